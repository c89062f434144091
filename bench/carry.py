"""The folder that `make gpu` takes along to a machine without a network: libraries, and the package of another commit.

    make gpu-carry ARGS="--against COMMIT"       # then build/carry travels with the checkout

build/carry/kernels has the libraries, compiled for `--architectures` by nvcc on a machine that needs no GPU. They use
LibTorch's stable ABI, so they serve torch 2.10 and newer. `make gpu` uses them if they are of its sources.
build/carry/against has the package of COMMIT. A measurement that is started there, with the repository's root in
PYTHONPATH, measures that package:

    cd build/carry/against && export FASTSAM_COMMIT=$(cat commit.txt) PYTHONPATH=../../..
    python -m bench federated --device cuda --out DIR
"""

import argparse
import io
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path

from bench import ROOT

CARRIED = ROOT / "build" / "carry"
LIBRARIES, AGAINST = CARRIED / "kernels", CARRIED / "against"
COMMIT_FILE = "commit.txt"  # in AGAINST
ARCHITECTURES_FILE = "architectures.txt"  # in LIBRARIES
LIMIT = 64.0  # MiB, with the files of the checkout


def build_libraries(folder: Path, architectures: str) -> None:
    """Compile the libraries for GPUs of these architectures into a folder. Raises CalledProcessError."""
    environment = os.environ | {"TORCH_CUDA_ARCH_LIST": architectures}
    command = [sys.executable, "-m", "fastsam_kernels.build", "--cuda", "--out", str(folder)]
    subprocess.run(command, check=True, cwd=ROOT, env=environment)
    (folder / ARCHITECTURES_FILE).write_text(f"{architectures}\n")


def export(commit: str, folder: Path, libraries: Path) -> None:
    """Write the package of a commit into a folder, under its installed names, with the libraries.

    The package ignores the libraries if its sources are different. Raises CalledProcessError for an unknown commit.
    """
    shutil.rmtree(folder, ignore_errors=True)
    command = ["git", "archive", commit, "fastsam", "kernels", "csrc"]
    archive = subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.PIPE).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as file:
        file.extractall(folder, filter="data")
    (folder / "kernels").rename(folder / "fastsam_kernels")
    for path in libraries.glob("*") if libraries.is_dir() else ():
        shutil.copy2(path, folder / "fastsam_kernels")
    name = subprocess.run(["git", "rev-parse", commit], check=True, cwd=ROOT, capture_output=True, text=True).stdout
    (folder / COMMIT_FILE).write_text(name)


def mebibytes(paths: Sequence[Path]) -> float:
    return sum(path.stat().st_size for path in paths if path.is_file()) / 2**20


def main(argv: Sequence[str] | None = None) -> int:
    """Return 1 if all files together are larger than the limit."""
    parser = argparse.ArgumentParser(prog="python -m bench.carry", description=__doc__.splitlines()[0])
    parser.add_argument("--architectures", default="9.0", help="of the GPUs, as in TORCH_CUDA_ARCH_LIST (default: 9.0)")
    parser.add_argument("--against", metavar="COMMIT", help="export the package of this commit")
    parser.add_argument("--limit", type=float, default=LIMIT, metavar="MIB", help=f"default: {LIMIT:.0f}")
    options = parser.parse_args(argv)
    build_libraries(LIBRARIES, options.architectures)
    if options.against:
        export(options.against, AGAINST, LIBRARIES)
    listing = subprocess.run(["git", "ls-files", "-z"], check=True, cwd=ROOT, capture_output=True, text=True).stdout
    checkout = mebibytes([ROOT / name for name in listing.split("\0") if name])
    carried = mebibytes(list(CARRIED.rglob("*")))
    print(f"{CARRIED}: {carried:.1f} MiB, with the checkout {carried + checkout:.1f} of {options.limit:.0f} MiB")
    return int(carried + checkout > options.limit)


if __name__ == "__main__":
    sys.exit(main())
