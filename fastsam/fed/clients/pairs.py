"""A client as a pair of tensors: checked, in the dtypes that training reads, on the device."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from fastsam.fed.common.checks import NUMBER_CLASSES

Pair = tuple[Tensor, Tensor]
ALIGNMENT = 64  # bytes, as torch allocates: how a matrix product rounds may depend on where its input starts


def is_array(value: Any) -> bool:
    """Return True if it is a tensor, or an array of numpy or another library."""
    return isinstance(value, Tensor) or hasattr(value, "__array__")


def checked_pair(pair: Any, label: str, dtype: torch.dtype, device: torch.device) -> Pair:
    """Return a pair as tensors on the device: floating-point ones in `dtype`, integer labels int64. Raises ValueError,
    with the name `label`, if it is not a valid pair."""
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        raise ValueError(f"{label} must be a pair (x, y) of tensors or arrays, got {type(pair).__name__}")
    x, y = (_tensor(part, f"{name} of {label}") for part, name in zip(pair, ("x", "y"), strict=True))
    if len(x) != len(y):
        raise ValueError(f"{label}: x has {len(x)} samples and y {len(y)}; they must be of one length")
    if len(y) == 0:
        raise ValueError(f"{label} has no samples; leave it out or give it some")
    if x.is_floating_point():
        x = x.to(device, dtype)
        if not all_finite(x):
            raise ValueError(f"{label}: x holds NaN or infinity (in {dtype}); remove or replace those values")
    return _to_device(x, device), _to_device(
        y.to(dtype if y.is_floating_point() else y.dtype if y.dtype == torch.bool else torch.int64), device
    )


def all_finite(x: Tensor) -> bool:
    """Return True if a floating-point tensor has neither NaN nor infinity. One pass, without a copy."""
    return x.numel() == 0 or all(bool(value.isfinite()) for value in torch.aminmax(x))


def check_unmasked(part: object, label: str) -> None:
    """Raise ValueError for a masked array of numpy, whose mask a tensor does not have."""
    if isinstance(part, np.ma.MaskedArray):
        raise ValueError(
            f"{label} is a masked array of numpy, and training would read what is masked. Replace those values "
            "(array.filled(...)) or leave the samples out"
        )


def _tensor(part: Any, label: str) -> Tensor:
    check_unmasked(part, label)
    if not isinstance(part, Tensor):
        try:
            part = torch.from_numpy(np.array(part, order="C"))  # a copy: torch warns of read-only arrays
        except (TypeError, ValueError) as error:
            raise ValueError(f"{label} must be a tensor or an array of numbers, got {_kind(part, error)}") from error
    if part.dim() == 0 or part.is_complex() or part.is_sparse:
        raise ValueError(
            f"{label} must be a dense real tensor whose first dimension counts samples, got {part.dtype} "
            f"{list(part.shape)}"
        )
    return part.detach()


def _kind(part: Any, error: Exception) -> str:
    """Return what a part is that is not an array of numbers, for messages."""
    return text_hint(part) or f"{type(part).__name__} ({error})"


def text_hint(values: Any) -> str:
    """Return a hint on labels that are texts, "" for other values."""
    if isinstance(values, np.ndarray):
        values = values[:1].tolist() if values.ndim and values.dtype.kind in "US" else ()
    is_text = isinstance(values, (list, tuple)) and len(values) > 0 and isinstance(values[0], str)
    return f"texts such as {str(values[0])!r}. {NUMBER_CLASSES}" if is_text else ""


def _to_device(tensor: Tensor, device: torch.device) -> Tensor:
    copy = tensor.to(device).contiguous()
    return copy if copy.data_ptr() % ALIGNMENT == 0 else copy.clone()
