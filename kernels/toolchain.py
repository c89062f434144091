"""The tools of a build: the installed torch, the compilers, ninja, and running commands.

Imports the standard library only. torch's version file is read, but torch is never imported: `pip install .` must work,
in seconds, in an environment without torch.
"""

from __future__ import annotations

import importlib.util
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

MINIMUM_TORCH = (2, 10)
CUDA_ARCHS = ("75", "80", "90", "100")  # compute capabilities with compiled code; newer GPUs use the PTX of the last
DRIVERS = {"12": "525", "13": "580"}  # oldest driver on Linux that serves a major version of CUDA


class BuildError(RuntimeError):
    """An error of a build. The message has the reason and a remedy.

    Attributes:
        built: the libraries that could be built, by device type.
    """

    def __init__(self, message: str, libraries: dict[str, Path] | None = None) -> None:
        super().__init__(message)
        self.built = libraries or {}


@dataclass(frozen=True)
class Torch:
    """An installed torch, read from its files."""

    version: str
    cuda: str | None  # the CUDA version it was built for
    root: Path

    @property
    def include(self) -> Path:
        return self.root / "include"

    @property
    def lib(self) -> Path:
        return self.root / "lib"


@dataclass(frozen=True)
class BuildStep:
    """A command. `depfile` is the file in which the compiler lists the headers that it read (None for a link step)."""

    output: str
    inputs: tuple[str, ...]
    argv: tuple[str, ...]
    depfile: str | None = None


def find_torch() -> Torch:
    """Return the torch of this environment. Raises BuildError if torch is missing or older than `MINIMUM_TORCH`."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise BuildError("torch is not installed in the environment of the build. Run pip with --no-build-isolation")
    root = Path(spec.origin).resolve().parent
    values = runpy.run_path(str(root / "version.py"))
    version = str(values["__version__"])
    match = re.match(r"(\d+)\.(\d+)", version)
    if match is None or (int(match[1]), int(match[2])) < MINIMUM_TORCH:
        raise BuildError(f"fastsam needs torch 2.10 or newer, this environment has {version}")
    return Torch(version, values.get("cuda"), root)


def find_cxx() -> list[str]:
    """Return the command of the C++ compiler: `$CXX`, else g++, clang++ or c++."""
    command = shlex.split(os.environ.get("CXX", ""))
    names = [command[0]] if command else ["g++", "clang++", "c++"]
    for name in names:
        if path := shutil.which(name):
            return [path, *command[1:]]
    packages = (
        "`apt-get install g++` on Debian and Ubuntu, `dnf install gcc-c++` on Fedora, `conda install gxx` with conda"
    )
    raise BuildError(f"no C++ compiler: {' or '.join(names)} not found on PATH. Install one ({packages}) or set CXX")


def find_nvcc() -> str | None:
    """Return nvcc's path from `$CUDACXX`, `$CUDA_HOME/bin`, PATH or CUDA's default folder, or None if it is not found.

    `CUDACXX` names a compiler, so no other compiler is used instead. `CUDA_HOME` is often set for other programs, so
    the search goes on if it has no nvcc.
    """
    if command := os.environ.get("CUDACXX"):
        return shutil.which(command)
    homes = [home for name in ("CUDA_HOME", "CUDA_PATH") if (home := os.environ.get(name))]
    places = [*(str(Path(home) / "bin" / "nvcc") for home in homes), "nvcc", "/usr/local/cuda/bin/nvcc"]
    return next((path for place in places if (path := shutil.which(place))), None)


def gencode(nvcc: str) -> list[str]:
    """Return nvcc's architecture flags: code for each of `CUDA_ARCHS` that this nvcc knows, and PTX of the newest."""
    if arch_list := os.environ.get("TORCH_CUDA_ARCH_LIST"):
        return [flag for entry in re.split(r"[;, ]+", arch_list.strip("; ,")) for flag in _gencode_entry(entry)]
    known_archs = set(re.findall(r"compute_(\d+)", output_of([nvcc, "--list-gpu-arch"])))
    archs = [a for a in CUDA_ARCHS if a in known_archs]
    if not archs:
        raise BuildError(
            f"{nvcc} cannot compile for any of sm_{', sm_'.join(CUDA_ARCHS)}. Install a CUDA toolkit from 12.6 on"
        )
    return [f"-gencode=arch=compute_{a},code=sm_{a}" for a in archs] + [
        f"-gencode=arch=compute_{archs[-1]},code=compute_{archs[-1]}"
    ]


def cuda_version(nvcc: str) -> str:
    """Return the CUDA version of nvcc and of the runtime that it links, such as "13.0"."""
    output = output_of([nvcc, "--version"])
    if match := re.search(r"release (\d+\.\d+)", output):
        return match[1]
    raise BuildError(f"`{nvcc} --version` must name its release, got {output.strip()!r}")


def driver_for(cuda: str) -> str:
    """Return which NVIDIA driver serves a library with this CUDA version, for messages."""
    oldest = DRIVERS.get(cuda.split(".")[0])
    return f"driver {oldest} or newer" if oldest else f"a driver for CUDA {cuda}"


def _gencode_entry(entry: str) -> list[str]:
    match = re.fullmatch(r"(\d+)\.(\d+[af]?)(\+PTX)?", entry)
    if match is None:
        raise BuildError(f"TORCH_CUDA_ARCH_LIST must be like '8.0;9.0+PTX', got the entry {entry!r}")
    arch = match[1] + match[2]
    codes = [f"sm_{arch}"] + ([f"compute_{arch}"] if match[3] else [])
    return [f"-gencode=arch=compute_{arch},code={code}" for code in codes]


def output_of(argv: Sequence[str]) -> str:
    try:
        return subprocess.run(argv, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise BuildError(f"{shlex.join(argv)} failed: {error}") from error


def _jobs() -> int:
    setting = os.environ.get("MAX_JOBS", "")
    if setting and not setting.isdigit():
        raise BuildError(f"MAX_JOBS must be a positive number, got {setting!r}")
    return max(1, int(setting or len(os.sched_getaffinity(0))))


def _ninja() -> list[str] | None:
    executable = Path(sys.executable).with_name("ninja")  # ninja of this environment, which may not be activated
    path = str(executable) if os.access(executable, os.X_OK) else shutil.which("ninja")
    return [path] if path else None


def _run(argv: Sequence[str], folder: Path) -> None:
    try:
        result = subprocess.run(
            argv, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
        )
    except OSError as error:
        raise BuildError(f"cannot run {argv[0]}: {error}") from error
    if result.returncode:
        lines = result.stdout.splitlines()
        error_lines = [line for line in lines if re.search(r"\berror: |\bfatal\b|undefined reference|FAILED: ", line)]
        error_lines.sort(key=lambda line: "FAILED: " in line)  # the compiler's line first, as it is clearer
        reason = error_lines[0] if error_lines else shlex.join(argv)
        raise BuildError("\n".join([f"compiling failed: {reason.strip()}", *lines[-40:]]))


def _ninja_file(steps: Sequence[BuildStep]) -> str:
    def escape(path: str) -> str:
        return re.sub(r"([$ :])", r"$\1", path)

    lines = []
    for number, step in enumerate(steps):
        lines += [f"rule r{number}", f"  command = {shlex.join(step.argv).replace('$', '$$')}"]
        lines += [f"  depfile = {step.depfile}", "  deps = gcc"] if step.depfile else []
        lines.append(f"build {escape(step.output)}: r{number} {' '.join(map(escape, step.inputs))}")
    return "\n".join(lines) + "\n"


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Lock the folder, so that only one process or thread builds in it at a time. Creates the folder."""
    import fcntl  # here, because Windows has none and may import this module

    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def execute(steps: Sequence[BuildStep], folder: Path) -> None:
    """Run `steps` in `folder`. With ninja only changed steps run, without it all of them.

    Several processes that build in one folder must lock it (`lock_folder`). Raises BuildError with the compiler's
    output.
    """
    if ninja := _ninja():
        (folder / "build.ninja").write_text(_ninja_file(steps))
        _run([*ninja, "-j", str(_jobs())], folder)
        return
    with ThreadPoolExecutor(_jobs()) as pool:
        list(pool.map(lambda step: _run(step.argv, folder), [s for s in steps if s.depfile]))
    for step in steps:
        if not step.depfile:
            _run(step.argv, folder)
