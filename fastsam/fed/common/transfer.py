"""Copies of host memory on the device of a run."""

from __future__ import annotations

import torch
from torch import Tensor


def to_device(t: Tensor, device: torch.device) -> Tensor:
    """Return a CPU tensor on `device`. It is copied from pinned memory, because otherwise the copy would wait for all
    that the stream has to do before."""
    if t.device == device:  # `to` takes time even where it does nothing
        return t
    return t.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else t.to(device)
