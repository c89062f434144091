"""The CUDA kernels on the CPU: csrc/cuda compiled as plain C++ against `emulation/cuda_runtime.h`, used as a backend.

It is the code that nvcc compiles, from the registration of the ops down to the last index, run block by block with a
fiber per thread. It cannot show blocks that run at the same time, or speed.
"""

import ctypes
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, ModuleType

import pytest
import torch

from fastsam import backends
from fastsam_kernels import build, direct_calls, libraries, native, toolchain
from tests.helpers.places import HELPERS, ROOT

SOURCES = (
    "norm.cu", "perturb.cu", "stochastic.cu", "dual.cu", "inner.cu", "accumulate.cu", "update.cu", "tickets.cu",
    "direct_calls.cu", "rowprograms.cu", "ops_cuda.cpp", "ops_rows.cpp", "../rowprograms/check.cpp",
)  # fmt: skip
REGISTRATIONS = ("ops_cuda.cpp", "ops_rows.cpp", "check.cpp")  # sources that include torch's headers
OWN_HEADERS = {"cuda/lines.cuh": "rowprograms.cu"}  # included by only one source
SHARED = "extern __shared__ __align__(16) unsigned char shared[];"  # a declaration in a kernel, replaced by ON_HOST
ON_HOST = "unsigned char* shared = emulation::dynamic_shared();"
FLAGS = ("-O0", "-fPIC", "-ffp-contract=off", "-Wno-unknown-pragmas", "-fvisibility=hidden")
CHECKS = ("-fsanitize=alignment,bounds",)
NAMESPACE = "fastsam_emulated"
LIBRARY = "emulation.so"
Changes = Mapping[str, Sequence[tuple[str, str]]]
NONE: Changes = MappingProxyType({})
ONLY_FLOAT: Changes = {
    "kernel_args.h": [("switch (problem.weight) {", "switch (Type::f32) {")]
}  # compiles in a fraction of the time


def _steps(csrc: Path, ready: Path | None, reused_objects: Sequence[str], fast: bool) -> list[toolchain.BuildStep]:
    """Return the build steps. `kept` names sources whose objects are in `ready`."""
    flags, checks = (("-O2", *FLAGS[1:]), ()) if fast else (FLAGS, CHECKS)
    torch_, cxx = toolchain.find_torch(), toolchain.find_cxx()
    steps, objects = [], []
    for path in [*((csrc / "cuda" / name).resolve() for name in SOURCES), HELPERS / "emulation" / "emulation.cpp"]:
        extra = (*build.TORCH_FLAGS, f"-isystem{torch_.include}") if path.name in REGISTRATIONS else checks
        includes = (f"-I{HELPERS / 'emulation'}", "-iquote", str(csrc))
        for output, options in build.variants_of(path, csrc):
            if ready and path.name in reused_objects:
                objects.append(str(ready / output))
                continue
            argv = (*cxx, "-x", "c++", "-std=c++20", *flags, *extra, *options, *includes, "-MD", "-MF", f"{output}.d")
            command = (*argv, "-c", str(path), "-o", output)
            steps.append(toolchain.BuildStep(output, (str(path),), command, f"{output}.d"))
            objects.append(output)
    link = (*cxx, "-shared", *objects, "-o", LIBRARY, f"-L{torch_.lib}", "-ltorch_cpu", "-Wl,--no-undefined")
    return [*steps, toolchain.BuildStep(LIBRARY, tuple(objects), link)]


def compile_library(
    folder: Path, changes: Changes = NONE, *, namespace: str = NAMESPACE, ready: Path | None = None, fast: bool = False
) -> Path:
    """Build the emulation in `folder`, where a later call compiles only changed sources.

    Args:
        namespace: namespace of its ops, which are registered for the CPU.
        changes: texts of sources to replace, by file name below csrc/: `{file: [(old, new)]}`.
        ready: folder with an emulation of the unchanged sources. Its registration (the slow part) is reused, and if no
            header changes also the objects of unchanged sources.
        fast: compile with the options that compilers use for the host of a GPU, without checks.
    """
    changed_files = {OWN_HEADERS.get(name, Path(name).name) for name in changes}
    reused_objects = [*REGISTRATIONS, "emulation.cpp"]
    if changed_files <= set(SOURCES):
        reused_objects = [Path(name).name for name in (*SOURCES, "emulation.cpp") if name not in changed_files]
    registration = "STABLE_TORCH_LIBRARY_IMPL(fastsam, CUDA, m)"
    cpu_registration = [(registration, f"STABLE_TORCH_LIBRARY_IMPL({namespace}, CPU, m)")]
    row_changes = [(SHARED, ON_HOST), *changes.get("cuda/rowprograms.cu", ())]
    changes = {
        **changes, "cuda/ops_cuda.cpp": cpu_registration, "cuda/ops_rows.cpp": cpu_registration,
        "cuda/rowprograms.cu": row_changes,
    }  # fmt: skip
    with toolchain.lock_folder(folder):
        copy_sources(build.csrc(), folder / "csrc", changes)
        toolchain.execute(_steps(folder / "csrc", ready, reused_objects, fast), folder)
    return folder / LIBRARY


def copy_sources(sources: Path, folder: Path, changes: Changes = NONE) -> None:
    """Copy the C++ and CUDA sources below `sources`, with the texts replaced that `changes` names."""
    for path in sources.rglob("*"):
        if path.suffix not in (".h", ".cuh", ".cu", ".cpp"):
            continue
        name, text = path.relative_to(sources).as_posix(), path.read_text()
        for old, new in changes.get(name, ()):
            assert text.count(old) == 1, f"{name} must hold {old!r} once"
            text = text.replace(old, new)
        copy = folder / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        if not copy.exists() or copy.read_text() != text:  # ninja looks at dates
            copy.write_text(text)


def schemas() -> list[str]:
    """Return the schemas of csrc/ops.cpp and csrc/rowprograms/ops.cpp."""
    text = "".join((build.csrc() / name).read_text() for name in ("ops.cpp", "rowprograms/ops.cpp"))
    matches = re.findall(r'm\.def\(\s*((?:"[^"]*"\s*)+)\)', text)
    return ["".join(re.findall(r'"([^"]*)"', literals)) for literals in matches]


@dataclass(frozen=True)
class _Backend(backends.Backend):
    kernels: ModuleType | None = None

    def load(self) -> ModuleType:
        assert self.kernels is not None
        return self.kernels


class Emulation:
    """A loaded emulation: its kernels as a backend (`backend`), and the launches and accesses that it counted."""

    def __init__(self, library: Path, namespace: str = NAMESPACE) -> None:
        self._definitions = torch.library.Library(namespace, "DEF")
        for schema in schemas():
            self._definitions.define(schema)
        self.path = library
        torch.ops.load_library(str(library))
        self._library = ctypes.CDLL(str(library))
        # The Python side of the compiled backend, with the ops of this namespace.
        module = ModuleType(namespace, native.__doc__)
        module.__dict__.update(__package__=native.__package__, __file__=native.__file__)
        code = Path(str(native.__file__)).read_text()
        assert code.count("torch.ops.fastsam") == 1, "every op must be found by the one name that is replaced here"
        code = code.replace("torch.ops.fastsam", f"torch.ops.{namespace}")
        exec(compile(code, str(native.__file__), "exec"), module.__dict__)
        self.backend = _Backend("cuda-emulated", "cpu", "native", lambda: None, kernels=module)

    def order(self, blocks: int, threads: int) -> None:
        """Set the order of blocks and threads: 0 ascending, 1 descending, a larger number is the seed of a shuffle."""
        self._library.emulation_order(blocks, threads)

    def count(self, name: str) -> int:
        """Return a counter since the library was loaded.

        Counters are launches, blocks, largest_argument (bytes), and the accesses misaligned and out_of_bounds.
        `last_stream` is the address of a stream.
        """
        function = getattr(self._library, f"emulation_{name}")
        function.restype = ctypes.c_int64
        return int(function())


@contextmanager
def direct(library: Path) -> Iterator[None]:
    """Let `direct_calls.CudaDirectCalls` use this library's functions and tensors of the CPU."""
    original = libraries.library
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(libraries, "library", lambda device="cpu": str(library) if device == "cuda" else original(device))
        patch.setattr(direct_calls, "_raw_stream", lambda device: 0)
        for cache in (direct_calls._function, direct_calls._rule):
            cache.cache_clear()
        yield
    for cache in (direct_calls._function, direct_calls._rule):
        cache.cache_clear()


_LOADED: dict[str, Emulation] = {}


def load_library(folder: Path, changes: Changes = NONE, namespace: str = NAMESPACE) -> Emulation:
    """Return the emulation with these changes, built in `folder`.

    Several modules of one process get the same object, because torch registers a namespace only once.
    """
    if namespace not in _LOADED:
        _LOADED[namespace] = Emulation(compile_library(folder, changes, namespace=namespace), namespace)
    return _LOADED[namespace]


def assert_found(error: str, script: str, library: Path) -> None:
    """Run a Python script with an emulation in which an error was seeded; it must fail unless `error` is "none"."""
    argv = [sys.executable, "-c", script, str(library)]
    process = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=300)
    if error == "none":
        assert process.returncode == 0, process.stderr
    else:
        assert process.returncode != 0, f"the error {error!r} went unnoticed"
        assert "AssertionError" in process.stderr or process.returncode < 0, process.stderr


def why_not() -> str | None:
    """Return the reason why the emulation cannot be built here, or None."""
    return build.why_not()
