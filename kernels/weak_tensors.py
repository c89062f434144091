"""A map whose keys are tensors that it does not keep alive."""

from __future__ import annotations

import weakref
from typing import Generic, TypeVar

from torch import Tensor

T = TypeVar("T")


class WeakTensorMap(Generic[T]):
    """A map from tensors, compared by identity, to values. An entry ends with its tensor.

    The callback of a deleted tensor is not a Python function, so no signal is handled in it.
    """

    def __init__(self) -> None:
        self._refs: dict[int, weakref.ref[Tensor]] = {}
        self._values: dict[weakref.ref[Tensor], T] = {}

    def get(self, tensor: Tensor) -> T | None:
        """Return the value of the tensor, or None."""
        ref = self._refs.get(id(tensor))
        return None if ref is None or ref() is not tensor else self._values.get(ref)

    def set(self, tensor: Tensor, value: T) -> T:
        """Store and return the value of the tensor."""
        refs, values = self._refs, self._values
        if id(tensor) in refs:
            values.pop(refs.pop(id(tensor)), None)
        if len(refs) > 2 * len(values) + 64:  # remove references to deleted tensors
            for key in [key for key, ref in list(refs.items()) if ref() is None]:
                refs.pop(key, None)
        values[ref := weakref.ref(tensor, values.pop)] = value
        refs[id(tensor)] = ref
        return value

    def __len__(self) -> int:
        return len(self._values)
