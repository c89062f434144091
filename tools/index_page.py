"""Absolute links in README, for the page of a package index: `python tools/index_page.py OWNER/NAME REF`.

The page of an index has no files next to it. Pictures and linked pages are read from the repository OWNER/NAME at REF,
a commit or a tag. The badge of the checks has a link that a code host resolves. README is rewritten in place, in a
checkout that is built and thrown away.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
HOST = "../../"  # from the page of a file to the page of the repository, on a code host
_TARGET = re.compile(r"(?<=\]\()(?!https?:|#|mailto:)[^)\s]+(?=\))")
_PICTURE = re.compile(r"!\[[^\]]*\]\($")


def absolute(text: str, repository: str, ref: str) -> str:
    """Return Markdown whose relative links lead to `repository` (owner/name) at `ref`.

    Raises ValueError if `repository` is not of this form.
    """
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", repository):
        raise ValueError(f"the repository must be OWNER/NAME, got {repository!r}")
    page = f"https://github.com/{repository}"
    picture = f"https://raw.githubusercontent.com/{repository}/{ref}"

    def address(target: re.Match[str]) -> str:
        if target[0].startswith(HOST):
            return f"{page}/{target[0].removeprefix(HOST)}"
        is_picture = _PICTURE.search(text, 0, target.start())
        return f"{picture if is_picture else f'{page}/blob/{ref}'}/{target[0]}"

    return _TARGET.sub(address, text)


if __name__ == "__main__":
    readme = ROOT / "README.md"
    readme.write_text(absolute(readme.read_text(), *sys.argv[1:]))
