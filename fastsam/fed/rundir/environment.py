"""The environment of a run, for the record in its directory."""

from __future__ import annotations

import platform
import sys
from typing import Any

import torch

from fastsam import backends
from fastsam.extras import DISTRIBUTION, installed_version


def float32_precision(device: torch.device) -> dict[str, str]:
    """Return the precision of float32 operations on `device` by operation: "ieee", or "tf32" or "bf16" for inputs with
    fewer bits. `torch.set_float32_matmul_precision` and the flags `allow_tf32` set it."""
    backends_of_torch: Any = torch.backends  # without types
    cuda, cudnn, mkldnn = backends_of_torch.cuda, backends_of_torch.cudnn, backends_of_torch.mkldnn
    if device.type == "cpu":
        operations = {"mkldnn.matmul": mkldnn.matmul, "mkldnn.conv": mkldnn.conv, "mkldnn.rnn": mkldnn.rnn}
    else:
        operations = {"cuda.matmul": cuda.matmul, "cudnn.conv": cudnn.conv, "cudnn.rnn": cudnn.rnn}
    precisions = {name: operation.fp32_precision for name, operation in operations.items()}
    return {name: "ieee" if precision == "none" else precision for name, precision in precisions.items()}


def environment(device: torch.device) -> dict[str, Any]:
    """Return versions, device and backends, for environment.json."""
    return {
        "python": platform.python_version(),
        "packages": {
            "fastsam": installed_version(DISTRIBUTION),
            **{name: installed_version(name) for name in ("torch", "triton", "torchvision", "numpy", "safetensors")},
        },
        "platform": platform.platform(),
        "processor": platform.processor() or platform.machine(),
        "device": str(device) if device.type == "cpu" else f"{device} ({torch.cuda.get_device_name(device)})",
        "cuda": torch.version.cuda,
        "float32_precision": float32_precision(device),
        "backends": {f"{b.name}/{b.device}": b.reason or "available" for b in backends.table()},
        "command": sys.argv,
    }
