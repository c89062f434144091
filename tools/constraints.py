"""Print pip constraints that keep the torch of this environment.

    python tools/constraints.py constraints.txt

The output is the given file with the installed torch, and without pins of packages that belong to one torch. If torch
is not installed, the file is printed unchanged. A torch older than fastsam can use is an error, because silently
replacing it could break other packages of the environment.
"""

from __future__ import annotations

import re
import sys
from importlib import metadata
from pathlib import Path

OLDEST = (2, 10)


def keep_installed_torch(text: str, installed_version: str | None) -> str:
    """Return `text` with `torch==installed`, and without pins of triton and torchvision, which belong to one torch.

    Raises SystemExit for a torch that is too old.
    """
    if installed_version is None:
        return text
    if tuple(int(part) for part in re.findall(r"\d+", installed_version)[:2]) < OLDEST:
        raise SystemExit(
            f"this environment has torch {installed_version}, fastsam needs 2.10 or newer: update it, or choose "
            "another with `make VENV=folder`"
        )
    if re.search(rf"^torch=={re.escape(installed_version.split('+')[0])}\s*(#.*)?$", text, re.MULTILINE):
        return text
    lines = [line for line in text.splitlines() if not re.match(r"(torch|torchvision|triton)\s*[=<>~]", line)]
    return "\n".join([*lines, f"torch=={installed_version}"]) + "\n"


def main(path: str) -> None:
    try:
        installed_version: str | None = metadata.version("torch")
    except metadata.PackageNotFoundError:
        installed_version = None
    sys.stdout.write(keep_installed_torch(Path(path).read_text(), installed_version))


if __name__ == "__main__":
    main(sys.argv[1])
