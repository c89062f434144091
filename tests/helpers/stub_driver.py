"""A CUDA library without a device (`stub_libcuda.c`), under which Triton compiles, loads and launches kernels on a
machine without a GPU. It receives the launches and runs none.

Triton reads the library's place when it starts, so a process is started with `environment(folder)` after
`build(folder)`, and calls `use` first.
"""

import os
import subprocess
import sys
from pathlib import Path

from tests.helpers.places import ROOT

ARCH = 90
STREAM = 0x57  # address of the current stream


def environment(folder: Path) -> dict[str, str]:
    """Return the environment of a process that uses the library in `folder`."""
    paths = {"TRITON_LIBCUDA_PATH": str(folder), "LD_LIBRARY_PATH": str(folder), "TRITON_CACHE_DIR": str(folder)}
    return os.environ | {"TRITON_INTERPRET": "0", **paths}


def build(folder: Path, env: dict[str, str]) -> None:
    """Compile the library into `folder`, with the headers of the Triton that `env` finds."""
    command = "import sys; from tests.helpers import stub_driver; stub_driver.compile_library(sys.argv[1])"
    subprocess.run([sys.executable, "-c", command, str(folder)], env=env, cwd=ROOT, check=True)


def compile_library(folder: str) -> None:
    """Compile the library into `folder`. Raises RuntimeError without a C++ compiler."""
    from triton.backends.nvidia import driver

    from fastsam_kernels import toolchain

    compiler = toolchain.find_cxx()
    if compiler is None:
        raise RuntimeError("Triton's launcher needs a C compiler, and there is none")
    source = Path(__file__).with_name("stub_libcuda.c")
    command = [*compiler, "-x", "c", "-shared", "-fPIC", *(f"-I{path}" for path in driver.include_dirs)]
    subprocess.run([*command, str(source), "-o", f"{folder}/libcuda.so.1"], check=True)


def use() -> None:
    """Let Triton launch kernels on tensors of the CPU by the library without a device."""
    from triton.backends.nvidia.driver import CudaDriver
    from triton.runtime import driver

    from fastsam_kernels import triton_launch

    active = CudaDriver()  # compiles its C module, as on a machine with a GPU
    active.get_current_device = lambda: 0
    active.get_device_capability = lambda device: (ARCH // 10, ARCH % 10)
    active.get_current_stream = lambda device: STREAM
    driver.set_active(active)
    triton_launch.is_current = lambda device: True  # torch has no current device here
