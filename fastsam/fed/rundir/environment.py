"""The environment of a run, for the record in its directory."""

from __future__ import annotations

import platform
import sys
from typing import Any

import torch

from fastsam import backends
from fastsam.extras import DISTRIBUTION, installed_version


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
        "backends": {f"{b.name}/{b.device}": b.reason or "available" for b in backends.table()},
        "command": sys.argv,
    }
