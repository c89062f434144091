"""Memory for the states of clients between their rounds: rows of slabs in pinned memory."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

log = logging.getLogger("fastsam.fed")


_FIRST_SLAB, _MAX_SLAB = 2**20, 2**30  # bytes of a slab: the first ones, and where they stop to double
# Rows of a slab, at least and at most: pinned memory is given out in powers of two, an eighth of which is lost with 8
# rows.
_ROWS = (8, 4096)


class HostPool:
    """Tensors in host memory. Each is a row of a slab, with one kind of slab per shape and dtype.

    A row is used again only after the tensor that was made of it is gone. A reference to an old state keeps its memory
    allocated. If `allocate`, which makes `[rows, *shape]`, fails, the log says so, and later slabs use ordinary memory.
    """

    def __init__(self, allocate: Callable[[Sequence[int], torch.dtype], Tensor] | None = None) -> None:
        self._allocate_pinned = make_pinned if allocate is None else allocate
        self.pins, self.nbytes = True, 0  # bytes of all slabs, used or not
        self._slabs: set[int] = set()
        self._free: dict[tuple[torch.Size, torch.dtype], list[Tensor]] = {}

    def row(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Return a tensor of this shape, with any content."""
        free = self._free.setdefault((shape, dtype), [])
        if not free:
            free += self._slab(shape, dtype).unbind()
        row = free.pop()
        tensor = row.view(shape)  # another object, whose end returns `row` to the pool
        weakref.finalize(tensor, free.append, row).atexit = False
        return tensor

    def holds(self, tensor: Tensor) -> bool:
        """Return True if `tensor` is a row of this pool."""
        return tensor.untyped_storage().data_ptr() in self._slabs

    def _slab(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Allocate a slab as large as all slabs so far, within limits."""
        size = max(shape.numel() * dtype.itemsize, 1)
        nbytes = max(min(max(self.nbytes, _FIRST_SLAB), _MAX_SLAB), _ROWS[0] * size)
        rows = min((1 << (nbytes - 1).bit_length()) // size, _ROWS[1])
        slab = self._allocate((rows, *shape), dtype)
        self.nbytes += slab.nbytes
        self._slabs.add(slab.untyped_storage().data_ptr())
        return slab

    def _allocate(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        if self.pins:
            try:
                return self._allocate_pinned(shape, dtype)
            except RuntimeError as error:
                self.pins = False
                log.warning(
                    "no more memory can be pinned for the states of clients (%s): they go to ordinary memory, and the "
                    "GPU waits for copies",
                    str(error).splitlines()[0],
                )
        return torch.empty(shape, dtype=dtype)


def make_pinned(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return uninitialised pinned memory. Raises RuntimeError if the system has none left."""
    return torch.empty(tuple(shape), dtype=dtype, pin_memory=True)
