"""A check of the Python state that a pass of a model may have changed."""

from __future__ import annotations

import random

import numpy as np
import torch
from torch import Tensor, nn

_PLAIN = (int, float, complex, str, bytes, bool, type(None))


def python_state(module: nn.Module) -> dict[str, object]:
    """Return Python's side of a model, as far as it can be compared (numbers, words, lengths, which tensors), and the
    random generators. Buffers are left out (see `TensorGuard`)."""
    state: dict[str, object] = {
        f"{name}.{key}".lstrip("."): comparable(value)
        for name, inner in module.named_modules()
        for key, value in inner.__dict__.items()
    }
    state["Python's random numbers"] = random.getstate()
    state["numpy's random numbers"] = [comparable(v) for v in np.random.get_state()]
    return state


def comparable(value: object) -> object:
    """Return a value that differs if the object has changed: a number, a text, a length, an identity or a version."""
    if isinstance(value, _PLAIN):
        return (type(value), repr(value))
    if isinstance(value, Tensor):
        return (id(value), value._version)
    if isinstance(value, np.ndarray):
        return value.tobytes()
    if isinstance(value, (list, tuple)):
        return [comparable(v) if isinstance(v, _PLAIN) else id(v) for v in value]
    if isinstance(value, (nn.Module, torch.ScriptObject)):  # the length of a scripted module raises
        return id(value)
    return (id(value), len(value)) if hasattr(value, "__len__") else id(value)


def difference(old_state: dict[str, object], new_state: dict[str, object]) -> str | None:
    """Return a description of the first difference, or None."""
    names = sorted(k for k in old_state.keys() | new_state.keys() if old_state.get(k) != new_state.get(k))
    return ", ".join(names[:3]) if names else None
