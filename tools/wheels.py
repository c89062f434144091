"""Makes what is published, in one folder: the sdist, the pure wheel, and the compiled wheel, checked and tagged by
auditwheel.

    python tools/wheels.py dist [--plat auto]

The compiled wheel has the CPU kernels, and those for CUDA where nvcc is (`FASTSAM_CUDA=0` leaves them out). It uses no
symbols of Python and only torch's stable ABI, so that one serves every Python from 3.10 and every torch from 2.10 on.
Its tag says the oldest glibc that its symbols
allow: manylinux_2_28, in the container of that name (`.github/workflows/wheels.yml`) as on a machine with a newer
glibc, where it is linked against stand-ins for the older one (`tools/old_glibc.py`). `--plat auto` links as the machine
does, and takes the tag that follows.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from tools import old_glibc  # noqa: E402  (found through the line above)

FROM_TORCH = (
    "libtorch.so",
    "libtorch_cpu.so",
    "libtorch_cuda.so",
    "libc10.so",
)  # loaded by `import torch`, and never copied into a wheel
LARGEST = 20_000_000  # bytes of a wheel


def run(argv: Sequence[str], **settings: str) -> None:
    """A command in the checkout, with the programs beside this Python on its path. Ends this program where it fails."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    code = subprocess.run(argv, cwd=ROOT, env={**os.environ, "PATH": path, **settings}).returncode
    if code:
        raise SystemExit(f"{' '.join(argv)} ended with {code}")


def build(kind: str, out: Path, **settings: str) -> None:
    """kind: "sdist" or "wheel". In this environment, since the compiled wheel needs its torch."""
    run([sys.executable, "-m", "build", "--no-isolation", f"--{kind}", "--outdir", str(out)], **settings)


def compiled(out: Path, plat: str) -> None:
    """The compiled wheel. Its libraries are stripped of symbols for debugging, and every library that they need is
    torch's or the platform's."""
    cuda = os.environ.get("FASTSAM_CUDA", "1" if shutil.which("nvcc") else "0")
    with tempfile.TemporaryDirectory() as scratch:
        flags = os.environ.get("FASTSAM_LDFLAGS", "")
        if old_glibc.needed(plat):
            flags = f"{flags} {old_glibc.link_flags(Path(scratch))}"
        build("wheel", Path(scratch), FASTSAM_NATIVE="1", FASTSAM_CUDA=cuda, FASTSAM_LDFLAGS=flags)
        (wheel,) = Path(scratch).glob("*.whl")
        excluded = [option for name in FROM_TORCH for option in ("--exclude", name)]
        tag = ["--plat", plat] if plat == "auto" else ["--plat", plat, "--only-plat"]
        command = [sys.executable, "-m", "auditwheel", "repair", "--strip", *excluded, *tag]
        run([*command, "--wheel-dir", str(out), str(wheel)])


def wrong(out: Path) -> list[str]:
    """What a folder of packages has too much of, or too little."""
    found = [f"{path.name} has {path.stat().st_size:,} bytes, more than {LARGEST:,}"
             for path in sorted(out.iterdir()) if path.stat().st_size > LARGEST]  # fmt: skip
    for pattern in ("*.tar.gz", "*-py3-none-any.whl", "*-abi3-manylinux_*.whl"):
        count = len(list(out.glob(pattern)))
        found += [f"{count} of {pattern}, not one"] if count != 1 else []
    return found


def clear(out: Path) -> None:
    """Removes the packages of an earlier run; anything else is not ours."""
    out.mkdir(parents=True, exist_ok=True)
    others = [path.name for path in out.iterdir() if not path.name.startswith("fastsam-")]
    if others:
        raise SystemExit(f"{out} has other files than packages of fastsam: {', '.join(sorted(others)[:3])}")
    for path in out.iterdir():
        path.unlink()


def default_plat() -> str:
    return old_glibc.POLICY if platform.machine() == "x86_64" else "auto"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python tools/wheels.py", description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="folder of the packages; earlier ones in it are removed")
    plat_help = "tag of the compiled wheel, auto: the oldest that it allows; default: %(default)s"
    parser.add_argument("--plat", default=default_plat(), help=plat_help)
    options = parser.parse_args(argv)
    out = options.out.resolve()
    clear(out)
    build("sdist", out)
    build("wheel", out, FASTSAM_NATIVE="0")
    compiled(out, options.plat)
    if problems := wrong(out):
        raise SystemExit("\n".join(problems))
    for path in sorted(out.iterdir()):
        print(f"{path.stat().st_size / 1e6:6.2f} MB  {path.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
