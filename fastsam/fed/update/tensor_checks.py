"""Checks of tensors that users' functions return. `expected` begins the message of an error."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor


def kind_of(value: object) -> str:
    """Return the type of a value, for messages. A dict's values that are not tensors are named."""
    if isinstance(value, Tensor):
        return f"{value.dtype} {list(value.shape)} on {value.device}"
    if isinstance(value, tuple):
        return f"({', '.join(map(kind_of, value))})"
    if isinstance(value, dict):
        bad = [f"{name!r}: {type(x).__name__}" for name, x in value.items() if not isinstance(x, Tensor)]
        return f"dict with {', '.join(bad[:3] or map(repr, value)) or 'nothing'}"
    return type(value).__name__


def tensor_dict(value: object, expected: str) -> dict[str, Tensor]:
    """Return a dict of tensors. Raises ValueError for other values."""
    if not isinstance(value, Mapping) or not all(isinstance(x, Tensor) for x in value.values()):
        raise ValueError(f"{expected}, got {kind_of(value)}")
    return dict(value)


def check_like(value: object, like: Tensor, expected: str) -> None:
    """Raise ValueError unless `value` is a tensor of the shape, dtype and device of `like`."""
    if not isinstance(value, Tensor) or (value.shape, value.dtype, value.device) != (
        like.shape,
        like.dtype,
        like.device,
    ):
        raise ValueError(f"{expected}, got {kind_of(value)}")
