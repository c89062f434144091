"""Every Triton op through Triton's own compiler, driver and launcher on a CUDA library without a device; prints the
launches as JSON.

Run in a separate process as `python -m tests.helpers.triton_launches FOLDER`, with TRITON_INTERPRET=0,
TRITON_LIBCUDA_PATH=FOLDER and FOLDER in LD_LIBRARY_PATH, after `build_libcuda(FOLDER)`.
"""

import ctypes
import json
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import torch

from fastsam_kernels import toolchain, triton_backend, triton_op
from tests.gpu.sanitized import every_op
from tests.helpers.gpu_step import Step
from tests.helpers.places import HELPERS

ARCH = 90


def build_libcuda(folder: str) -> None:
    from triton.backends.nvidia import driver

    source = HELPERS / "emulation" / "fake_libcuda.c"
    command = [*toolchain.find_cxx(), "-x", "c", "-shared", "-fPIC", *(f"-I{path}" for path in driver.include_dirs)]
    subprocess.run([*command, str(source), "-o", f"{folder}/libcuda.so.1"], check=True)


def main(folder: Path) -> dict[str, list[list[str]]]:
    from triton.backends.nvidia.driver import CudaDriver
    from triton.runtime import driver

    active = CudaDriver()  # compiles its C module, as on a machine with a GPU
    active.get_current_device = lambda: 0
    active.get_device_capability = lambda device: (ARCH // 10, ARCH % 10)
    active.get_current_stream = lambda device: 0
    driver.set_active(active)
    triton_op._surroundings = lambda device: nullcontext()  # torch has no current device here
    log = ctypes.CDLL(str(folder / "libcuda.so.1")).fake_log
    log.restype = ctypes.c_char_p
    launches: dict[str, list[list[str]]] = {}
    num_lines = 0
    for dtype in (torch.float32, torch.bfloat16):
        for rows in (1, 2):
            step = Step([33, 0, 4097, 5], rows, dtype=dtype, device="cpu", master=dtype == torch.bfloat16)
            every_op(triton_backend, step, shift=0)
            lines = log().decode().splitlines()
            launches[f"{str(dtype).removeprefix('torch.')} {rows}"] = [line.split() for line in lines[num_lines:]]
            num_lines = len(lines)
    return launches


if __name__ == "__main__":
    json.dump(main(Path(sys.argv[1])), sys.stdout)
