"""The compiled libraries that are loaded, and the reasons why others are not.

They come from the installed package, or, with FASTSAM_JIT=1, from a cache where they are built at first use.
"""

from __future__ import annotations

import ctypes
import functools
import os
from typing import Any

import torch
from torch import Tensor

from . import build

OPS = (
    "norm_",
    "perturb_",
    "restore_",
    "dual_norm_",
    "dual_perturb_",
    "inner_",
    "accumulate_",
    "update_norm_",
    "update_",
)
_libraries: dict[str, str] = {}


@functools.cache
def _load() -> dict[str, str | None]:
    """Load the libraries. Return for each device type the reason why its library cannot be used, or None."""
    cuda_reason = None if torch.cuda.is_available() else "torch sees no CUDA device"
    try:
        result = build.installed()
        if not result.paths and os.environ.get("FASTSAM_JIT") == "1":
            result = build.jit()
    except build.BuildError as error:
        result = build.BuildResult({}, str(error))
    cpu_reason = _load_library(str(result.paths["cpu"])) if "cpu" in result.paths else result.message
    if cpu_reason is not None:
        return {"cpu": cpu_reason, "cuda": cuda_reason or cpu_reason}
    _libraries["cpu"] = str(result.paths["cpu"])
    for name in OPS:
        torch.library.register_fake(f"fastsam::{name}", functools.partial(_infer_nothing, name))
    if cuda_reason is None:
        cuda_reason = driver_problem(result.cuda)
    if cuda_reason is None:
        problem = f"no compiled CUDA library ({result.message}); `{build.COMMAND}` with nvcc compiles it"
        cuda_reason = _load_library(str(result.paths["cuda"])) if "cuda" in result.paths else problem
        _libraries["cuda"] = str(result.paths.get("cuda"))
    return {"cpu": None, "cuda": cuda_reason}


def driver_cuda() -> str | None:
    """Return the newest CUDA version that the installed NVIDIA driver serves, such as "12.4", or None without one."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    version = ctypes.c_int()  # 12040 is 12.4
    if driver.cuDriverGetVersion(ctypes.byref(version)) != 0:
        return None
    return f"{version.value // 1000}.{version.value % 1000 // 10}"


def driver_problem(cuda: str | None) -> str | None:
    """Return why the driver cannot serve a library with this CUDA version, or None. Within a major version it can."""
    served = driver_cuda()
    if cuda is None or served is None or int(served.split(".")[0]) >= int(cuda.split(".")[0]):
        return None
    return (
        f"the compiled CUDA library has CUDA {cuda}, which needs {build.driver_for(cuda)}, and the driver here serves "
        f"CUDA {served}. Update the driver, or compile with nvcc {served.split('.')[0]}: `{build.COMMAND} --cuda`"
    )


def _infer_nothing(name: str, *operands: Any) -> None:
    """Infer the results of an op for torch.compile: none, because every op only writes its arguments.

    Raises RuntimeError if the tensors are on different devices, such as a real tensor and a meta tensor.
    """
    schema = getattr(torch.ops.fastsam, name).default._schema
    operand_of = {argument.name: operand for argument, operand in zip(schema.arguments, operands, strict=False)}
    table = operand_of.pop("table", None)
    lists = (operand if isinstance(operand, (list, tuple)) else [operand] for operand in operand_of.values())
    devices = {tensor.device for operand in lists for tensor in operand if isinstance(tensor, Tensor)}
    if len(devices) > 1 or (table is not None and table.device.type != "cpu"):
        names = ", ".join(sorted(map(str, devices)))
        raise RuntimeError(f"{name}: the table must be on the CPU, and all other tensors on one device, got {names}")


def _load_library(path: str) -> str | None:
    try:
        torch.ops.load_library(path)
    except OSError as error:
        return f"{path} cannot be loaded: {error}; `{build.COMMAND}` rebuilds it"
    return None


def why_not(device: str) -> str | None:
    """Return the reason why the compiled kernels cannot serve on this device type, or None."""
    return _load().get(device, f"there are no compiled kernels for the device {device!r}")


def library(device: str = "cpu") -> str:
    """Return the library file for this device type. Raises RuntimeError with the reason if it cannot be used."""
    if (reason := why_not(device)) is not None:
        raise RuntimeError(reason)
    return _libraries[device]


def build_hint() -> str:
    """Return advice on how to get the missing compiled kernels: the command, and what to install first."""
    if why_not("cpu") is None:
        return f"With nvcc on PATH `{build.COMMAND}` builds the kernels for GPUs"
    reason = build.why_not()
    if reason is None:
        return f"A compiler is here: `{build.COMMAND}` builds them (or set FASTSAM_JIT=1 to build them at first use)"
    return f"To get them: {reason}; then run `{build.COMMAND}`"
