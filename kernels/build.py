"""The build of the compiled libraries: sources, flags and compilers.

Used by `setup.py` (a wheel or an editable install), by `FASTSAM_JIT=1` (at first use, into a cache) and by
`python -m fastsam_kernels.build` (into the installed package).

- `libfastsam_cpu.so`: `csrc/*.cpp`, `csrc/rowprograms/*.cpp` and `csrc/cpu/*.cpp`;
- `libfastsam_cuda.so`: `csrc/cuda/*.cu`, the registrations `csrc/cuda/*.cpp` and `csrc/rowprograms/check.cpp`. It is
  built if nvcc is found and torch is a CUDA build, or if `FASTSAM_CUDA=1` is set.

The libraries use no symbols of Python or of torch's C++ API. They use only LibTorch's stable ABI, so that one binary
serves every Python, and torch 2.10 and newer.

Environment variables:

    CXX                   C++ compiler
    CUDACXX, CUDA_HOME    nvcc, or the CUDA toolkit that has it
    TORCH_CUDA_ARCH_LIST  GPU architectures, such as "8.0;9.0+PTX"
    MAX_JOBS              number of parallel jobs
    FASTSAM_CUDA          1 builds the CUDA library, 0 does not
    FASTSAM_LDFLAGS       further options of the C++ compiler for linking
    XDG_CACHE_HOME        parent of the cache folder of `FASTSAM_JIT=1`
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import shlex
import stat
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from .toolchain import (
    BuildError,
    BuildStep,
    Torch,
    cuda_version,
    driver_for,
    execute,
    find_cxx,
    find_nvcc,
    find_torch,
    gencode,
    lock_folder,
    output_of,
)

FOLDER = Path(__file__).resolve().parent
FILES = {"cpu": "libfastsam_cpu.so", "cuda": "libfastsam_cuda.so"}
REPORT = "native.json"  # report next to the libraries: hash of their sources, and the build message
COMMAND = "python -m fastsam_kernels.build"

# Results must not depend on which clone of a function a processor runs: no contraction to fused multiply-add on the
# host. Without `-fno-math-errno` and `-fno-trapping-math` sqrt is not vectorised; neither changes a bit.
CXX_FLAGS = (
    "-std=c++20",
    "-O3",
    "-fPIC",
    "-fvisibility=hidden",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-Wall",
)
TORCH_FLAGS = ("-DTORCH_TARGET_VERSION=0x020a000000000000",)  # torch 2.10, see torch/headeronly/version.h
NVCC_FLAGS = (
    "-std=c++20",
    "-O3",
    "-fmad=false",  # no contraction on the device either: the same rules, the same bits
    "-Xcompiler=-fPIC,-fvisibility=hidden",
    "-Xfatbin=-compress-all",  # a fifth of the size
    "-cudart=static",
)


@dataclass(frozen=True)
class BuildResult:
    """The result of a build.

    Attributes:
        paths: the libraries, by device type ("cpu", "cuda").
        message: a description of the result for the user.
        cuda: CUDA version in the library for GPUs, such as "13.0". None without that library.
    """

    paths: dict[str, Path] = field(default_factory=dict)
    message: str = ""
    cuda: str | None = None


# --- the environment ---


def csrc() -> Path:
    """Return the folder of the C++ and CUDA sources: in an installed package, or next to this folder in a checkout."""
    for folder in (FOLDER / "csrc", FOLDER.parent / "csrc"):
        if (folder / "ops.cpp").is_file():
            return folder
    raise BuildError(f"the C++ sources are missing: no ops.cpp in {FOLDER / 'csrc'}; reinstall fastsam")


def source_digest() -> str:
    """Return a hash of every C++ and CUDA source (names and contents, not dates) and of the flags."""
    root, digest = csrc(), hashlib.sha256(repr((CXX_FLAGS, TORCH_FLAGS, NVCC_FLAGS)).encode())
    for path in sorted(p for p in root.rglob("*") if p.suffix in (".cpp", ".cu", ".h", ".cuh")):
        digest.update(f"{path.relative_to(root)}\0{path.stat().st_size}\0".encode() + path.read_bytes())
    return digest.hexdigest()


def why_not() -> str | None:
    """Return the reason why the libraries cannot be compiled in this environment, or None."""
    try:
        csrc(), find_torch(), find_cxx()
    except BuildError as error:
        return str(error)
    return None if sys.platform == "linux" else f"the libraries are built on Linux, this is {sys.platform}"


def _wants_cuda(torch: Torch, cuda: bool | None) -> bool:
    """Return True if the CUDA library is to be built. Raises BuildError for an explicit request without nvcc."""
    setting = os.environ.get("FASTSAM_CUDA", "")
    if setting not in ("", "0", "1"):
        raise BuildError(f"FASTSAM_CUDA must be 0 or 1, got {setting!r}")
    if cuda is None and setting:
        cuda = setting == "1"
    if cuda and find_nvcc() is None:
        advice = "install the CUDA toolkit, or set CUDA_HOME or CUDACXX"
        raise BuildError(f"a CUDA library was requested, but nvcc is not found: {advice}")
    return bool(find_nvcc() and torch.cuda) if cuda is None else cuda


# --- the commands ---


def rules(root: Path) -> list[str]:
    """Return the names of the update rules: every `csrc/rules/NAME.h`."""
    return sorted(path.stem for path in root.glob("rules/*.h"))


def variants_of(source: Path, root: Path) -> list[tuple[str, tuple[str, ...]]]:
    """Return the names and extra flags of the object files of a source.

    A source has one object file, `update.cpp` and `update.cu` one per rule.
    """
    name = source.relative_to(root).as_posix().replace("/", "_") if source.is_relative_to(root) else source.name
    if source.stem != "update":
        return [(f"{name}.o", ())]
    return [(f"{name}.{rule}.o", (f"-DFASTSAM_RULE={rule}",)) for rule in rules(root)]


def _compile(source: Path, root: Path, argv: Sequence[str]) -> list[BuildStep]:
    return [
        BuildStep(
            output,
            (str(source),),
            (*argv, *flags, "-MD", "-MF", f"{output}.d", "-c", str(source), "-o", output),
            f"{output}.d",
        )
        for output, flags in variants_of(source, root)
    ]


def _relocate(torch: Torch, root: Path) -> tuple[str, str]:
    """Return flags that keep the folders of the compiling machine out of the source names in error messages."""
    return f"-ffile-prefix-map={root}=csrc", f"-ffile-prefix-map={torch.root}=torch"


def _link_flags() -> list[str]:
    return shlex.split(os.environ.get("FASTSAM_LDFLAGS", ""))


def cpu_steps(torch: Torch) -> list[BuildStep]:
    """Return the commands that build `libfastsam_cpu.so`. The sources in `cpu/` include no header of torch."""
    root, cxx = csrc(), find_cxx()
    flags = [*cxx, *CXX_FLAGS, f"-I{root}", *_relocate(torch, root)]
    torch_flags = [*flags, *TORCH_FLAGS, f"-isystem{torch.include}"]
    # The kernels take longest and are compiled first, so that no job waits for a long one at the end.
    steps = [step for path in sorted(root.glob("cpu/*.cpp"), reverse=True) for step in _compile(path, root, flags)]
    sources = sorted([*root.glob("*.cpp"), *root.glob("rowprograms/*.cpp")])
    steps += [step for path in sources for step in _compile(path, root, torch_flags)]
    objects = tuple(step.output for step in steps)
    # No run path is set. torch is loaded first, and the loader then finds it by its soname in any folder.
    options = (*_link_flags(), f"-L{torch.lib}", "-ltorch_cpu", "-Wl,--no-undefined", "-Wl,--as-needed")
    return [*steps, BuildStep(FILES["cpu"], objects, (*cxx, "-shared", *objects, "-o", FILES["cpu"], *options))]


def cuda_steps(torch: Torch) -> list[BuildStep]:
    """Return the commands that build `libfastsam_cuda.so`. Only the `.cpp` files include torch's headers."""
    root, cxx, nvcc = csrc(), find_cxx(), find_nvcc()
    assert nvcc is not None, "the caller asks _wants_cuda first"
    driver, archs = [nvcc, f"-ccbin={cxx[0]}"], gencode(nvcc)
    flags = [*driver, *NVCC_FLAGS, *(f'-Xcompiler="{flag}"' for flag in _relocate(torch, root))]
    steps = [step for path in sorted(root.glob("cuda/*.cu")) for step in _compile(path, root, [*flags, *archs])]
    torch_flags = [*TORCH_FLAGS, "-DUSE_CUDA", f"-isystem={torch.include}"]
    for path in [*sorted(root.glob("cuda/*.cpp")), *root.glob("rowprograms/check.cpp")]:
        steps += _compile(path, root, [*flags, *torch_flags])
    objects, folder = tuple(step.output for step in steps), str(torch.lib)
    if not (torch.lib / "libtorch_cuda.so").exists():
        # A CPU build of torch: link an empty library of that name, which records the need for the real one at run time.
        stub = "stub/libtorch_cuda.so"
        argv = (*cxx, "-shared", "-x", "c++", "/dev/null", "-Wl,-soname,libtorch_cuda.so", "-o", stub)
        steps, folder = [*steps, BuildStep(stub, (), argv)], "stub"
    options = ("-Xlinker=--no-as-needed", f"-L{folder}", f"-L{torch.lib}", "-ltorch_cuda", "-ltorch_cpu")
    host = [f'-Xcompiler="{flag}"' for flag in _link_flags()]
    argv = (*driver, "-shared", "-cudart=static", *archs, *host, *objects, "-o", FILES["cuda"], *options)
    return [*steps, BuildStep(FILES["cuda"], tuple(step.output for step in steps), argv)]


# --- building and finding libraries ---


def build(out_dir: str | Path, *, cuda: bool | None = None, work_dir: str | Path | None = None) -> BuildResult:
    """Compile the libraries and put them, with their report, into `out_dir`.

    Args:
        out_dir: folder for the libraries.
        cuda: build the CUDA library too. None follows `FASTSAM_CUDA`. If that is not set, the library is built if nvcc
            is found and torch is a CUDA build.
        work_dir: folder for object files, so that ninja compiles only changed sources. Default: a temporary folder.

    Returns:
        The libraries. If an optional CUDA library could not be built, the message has the reason.

    Raises:
        BuildError: the CPU library or a requested CUDA library cannot be built. In the second case `out_dir` has the
            CPU library.
    """
    if reason := why_not():
        raise BuildError(reason)
    torch, out_dir = find_torch(), Path(out_dir)
    with tempfile.TemporaryDirectory() as scratch:
        work = Path(work_dir or scratch).resolve()
        with lock_folder(work):
            result, cuda_error = _compile_all(torch, work, cuda)
            files = publish(result, out_dir)
    if cuda_error is not None:
        raise BuildError(str(cuda_error), files.paths) from cuda_error
    return files


def _compile_all(torch: Torch, work: Path, cuda: bool | None) -> tuple[BuildResult, BuildError | None]:
    """Compile the libraries. Return the result, and the error of a requested CUDA library that could not be built."""
    execute(cpu_steps(torch), work)
    paths, notes, cuda_error = {"cpu": work / FILES["cpu"]}, list[str](), None
    version = None
    try:
        if _wants_cuda(torch, cuda):
            (work / "cuda" / "stub").mkdir(parents=True, exist_ok=True)
            execute(cuda_steps(torch), work / "cuda")
            paths["cuda"] = work / "cuda" / FILES["cuda"]
            version = cuda_version(str(find_nvcc()))
            notes = [f"its CUDA {version} needs {driver_for(version)}"]
    except BuildError as error:
        notes = [f"the CUDA library could not be built: {error}"]
        if cuda or os.environ.get("FASTSAM_CUDA"):
            cuda_error = error
    names = " and ".join(path.name for path in paths.values())
    message = "; ".join([f"built {names} with torch {torch.version}", *notes])
    return BuildResult(paths, message, version), cuda_error


def _replace(content: bytes, path: Path) -> Path:
    """Replace the file atomically. A process that has mapped the old file keeps it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
            fresh = Path(scratch) / path.name
            fresh.write_bytes(content)
            fresh.replace(path)
    except OSError as error:
        raise BuildError(f"cannot write {path}: {error}. FASTSAM_JIT=1 builds into a cache folder instead") from error
    return path


def publish(result: BuildResult, out_dir: Path) -> BuildResult:
    """Put the libraries of `result` into `out_dir`, with a report of their sources.

    The report keeps only the first line of the message. The compiler's whole output is printed by the build.
    """
    paths = {kind: _replace(path.read_bytes(), out_dir / path.name) for kind, path in result.paths.items()}
    message, names = result.message.splitlines()[0], [path.name for path in paths.values()]
    report = {"libraries": names, "message": message, "sources": source_digest(), "cuda": result.cuda}
    _replace(json.dumps(report, indent=1).encode() + b"\n", out_dir / REPORT)
    return BuildResult(paths, result.message, result.cuda)


def installed(folder: str | Path = FOLDER) -> BuildResult:
    """Return the libraries in `folder` (default: the installed package) that were built from its present sources.

    Libraries of different sources (an edited checkout, files of a previous version) are not returned. `message` has the
    reason why libraries are missing.
    """
    folder = Path(folder)
    if not (folder / REPORT).is_file():
        return BuildResult({}, f"no compiled libraries in {folder}; `{COMMAND}` compiles them")
    try:
        report = json.loads((folder / REPORT).read_text())
        names, message, sources, cuda = (report[key] for key in ("libraries", "message", "sources", "cuda"))
    except (ValueError, KeyError, TypeError) as error:
        return BuildResult({}, f"{folder / REPORT} cannot be read ({error!r}); `{COMMAND}` compiles the libraries anew")
    if not names:
        return BuildResult({}, f"{message}. `{COMMAND}` compiles them now")
    if sources != source_digest():
        return BuildResult(
            {}, f"the compiled libraries are from other sources than the installed ones; `{COMMAND}` rebuilds them"
        )
    paths = {kind: folder / name for kind, name in FILES.items() if name in names}
    if missing_files := [str(path) for path in paths.values() if not path.is_file()]:
        return BuildResult({}, f"{' and '.join(missing_files)} is gone; `{COMMAND}` rebuilds it")
    return BuildResult(paths, message, cuda)


def cache_dir() -> Path:
    """Return `$XDG_CACHE_HOME/fastsam`, by default `~/.cache/fastsam`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fastsam"


def _cache_key(torch: Torch) -> str:
    nvcc = find_nvcc() if _wants_cuda(torch, None) else None
    tools = [output_of([*find_cxx(), "--version"])]
    try:
        tools += [output_of([nvcc, "--version"]), *gencode(nvcc)] if nvcc else []
    except BuildError as error:  # the build reports an nvcc that does not run
        tools.append(str(error))
    parts = [source_digest(), torch.version, platform.machine(), *tools]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:20]


def _require_own(folder: Path) -> None:
    """Raise BuildError if another user could put a library into the folder. A loaded library is executed."""
    status = folder.lstat()
    if hasattr(os, "geteuid") and stat.S_ISDIR(status.st_mode):
        if status.st_uid != os.geteuid():
            raise BuildError(
                f"the cache {folder} belongs to user {status.st_uid}, not to you ({os.geteuid()}), so its libraries "
                "are not loaded. Set XDG_CACHE_HOME to a folder that belongs to you"
            )
        if status.st_mode & 0o022:
            raise BuildError(
                f"others can write to the cache {folder}, so its libraries are not loaded. Remove it, then `chmod 700` "
                "its parent folder, or set XDG_CACHE_HOME to a different folder"
            )
    elif stat.S_ISLNK(status.st_mode):
        raise BuildError(f"the cache {folder} is a link that others may change; set XDG_CACHE_HOME to its target")


def jit() -> BuildResult:
    """Return the libraries from the cache, compiled first if necessary (FASTSAM_JIT=1).

    Several processes may call this at once. Raises BuildError if the libraries cannot be compiled, if the cache cannot
    be written, or if other users can write to it.
    """
    if reason := why_not():
        raise BuildError(reason)
    final = cache_dir() / _cache_key(find_torch())
    for folder in (final.parent, final):
        if os.path.lexists(folder):
            _require_own(folder)
    if not final.is_dir():
        try:
            with lock_folder(final.parent), tempfile.TemporaryDirectory(dir=final.parent) as scratch:
                if not final.is_dir():  # another process may have built it before this one got the lock
                    build(Path(scratch) / "out")
                    (Path(scratch) / "out").chmod(0o700)
                    os.rename(Path(scratch) / "out", final)
        except OSError as error:
            raise BuildError(
                f"cannot write to the cache {cache_dir()}: {error}. Set XDG_CACHE_HOME to a folder that can be written"
            ) from error
    return installed(final)


def main(argv: Sequence[str] | None = None) -> int:
    """Run `python -m fastsam_kernels.build`: compile into the installed package."""
    parser = argparse.ArgumentParser(
        prog=COMMAND, description="Compile fastsam's libraries into the installed package."
    )
    cuda_help = "build the CUDA library (default: when nvcc and a CUDA torch are there)"
    parser.add_argument("--cuda", action=argparse.BooleanOptionalAction, help=cuda_help)
    out_help = "where to put the libraries (default: the installed package)"
    parser.add_argument("--out", type=Path, default=FOLDER, metavar="DIR", help=out_help)
    options = parser.parse_args(argv)
    try:
        root = csrc().parent  # a checkout keeps its object files, so that the next build is short
        result = build(options.out, cuda=options.cuda, work_dir=None if root == FOLDER else root / "build" / "native")
    except BuildError as error:
        print(f"fastsam: {error}", file=sys.stderr)
        return 1
    print(f"fastsam: {result.message}")
    print(*(f"  {path}" for path in result.paths.values()), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
