"""Tensors and tables that do not fit an op, each as a change of a right one."""

from collections.abc import Callable

import torch
from torch import Tensor


def free_storage(t: Tensor) -> Tensor:
    t = t.clone()
    t.untyped_storage().resize_(0)
    return t


def shorten_storage(t: Tensor) -> Tensor:
    t = t.clone()
    t.untyped_storage().resize_(t.untyped_storage().nbytes() - 1)
    return t


def spread(t: Tensor) -> Tensor:
    """Return the same numbers with gaps between them."""
    wide = t.new_empty(*t.shape[:-1], t.shape[-1], 2)
    wide[..., 0] = t
    return wide[..., 0]


def other_dtype(t: Tensor) -> Tensor:
    return t.to(torch.float32 if t.dtype == torch.float64 else torch.float64)


def change_at(place: int, change: Callable[[Tensor], Tensor]) -> Callable[[list[Tensor]], list[Tensor]]:
    return lambda tensors: [change(t) if i == place else t for i, t in enumerate(tensors)]


def entry(row: int, column: int, value: int) -> Callable[[Tensor], Tensor]:
    def change(table: Tensor) -> Tensor:
        table = table.clone()
        table[row, column] = value
        return table

    return change
