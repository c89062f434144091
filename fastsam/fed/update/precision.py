"""The precision of a run: float32 as torch's flags are, exact or TF32, or passes in bfloat16 by autocast.

Weights, gradients, losses, sums and states stay float32. Autocast covers the model's forward pass, and with it the
backward pass; its outputs are float32 again, so that losses are computed as autocast computes torch's own losses.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fastsam.fed.update.model_copy import copy_model

PRECISIONS = ("float32", "tf32", "bf16")
_FLAGS = {"float32": "ieee", "tf32": "tf32"}  # values of torch's flags


class AutocastForward:
    """The forward pass of a model in bfloat16. A deep copy of the model has a deep copy of it."""

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self.module, self.device_type = module, device.type

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # A cache would keep casts of weights that change between two passes of one step.
        with torch.autocast(self.device_type, torch.bfloat16, cache_enabled=False):
            outputs = type(self.module).forward(self.module, *args, **kwargs)
        return pytree.tree_map_only(Tensor, _to_float32, outputs)


def _to_float32(x: Tensor) -> Tensor:
    return x.float() if x.dtype is torch.bfloat16 else x


def with_precision(model: nn.Module, precision: str | None, device: torch.device) -> nn.Module:
    """Return the model, or for "bf16" a copy that shares its tensors and whose forward pass is in bfloat16.

    Raises:
        ValueError: the model or the device cannot have this precision.
    """
    if precision == "tf32" and device.type != "cuda":
        raise ValueError(f"precision='tf32' needs an NVIDIA GPU, but the run is on {device}. Use 'float32' or 'bf16'")
    if precision != "bf16":
        return model
    if any(p.dtype is not torch.float32 for p in model.parameters() if p.requires_grad):
        raise ValueError("precision='bf16' needs float32 parameters. Convert the model with model.float()")
    result = copy_model(model, (*model.parameters(), *model.buffers()))
    result.forward = AutocastForward(result, device)
    return result


@contextmanager
def float32_flags(precision: str | None, device: torch.device) -> Iterator[None]:
    """Set torch's flags of float32 matrix products and convolutions inside, and the old ones afterwards."""
    backends: Any = torch.backends  # without types
    on_device = (backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn)
    on_cpu = (backends.mkldnn.matmul, backends.mkldnn.conv, backends.mkldnn.rnn)
    flags = [] if precision not in _FLAGS else on_cpu if device.type == "cpu" else on_device
    old_values = [flag.fp32_precision for flag in flags]
    try:
        for flag in flags:
            flag.fp32_precision = _FLAGS[str(precision)]
        yield
    finally:
        for flag, value in zip(flags, old_values, strict=True):
            flag.fp32_precision = value
