"""Lookups in the tables of stacked clients, with the checks and gradients of single clients.

Under `torch.vmap` torch joins the tables of all rows to one long table. An index outside the table of a row then reads
the table of another row, and the padding index of a row is an ordinary index of the joint table.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

OUTSIDE = 2**40  # an index outside of the joint table of any number of rows


class StackedLookups(TorchFunctionMode):
    """While it is entered, `F.embedding` and `F.one_hot` of the rows of a vmap do what they do for a single row.

    The checks are operations on tensors, so a recording has them. A mode costs time in every call of torch. Therefore a
    model that looks up nothing in its first pass of a shape has none in later passes of the shape.
    """

    def __init__(self) -> None:
        super().__init__()
        self._is_used, self._shapes = False, set[Hashable]()

    @contextmanager
    def of_shape(self, shape: Hashable) -> Iterator[None]:
        """Enter the mode for a pass of this shape if it may look up something."""
        if not self._is_used and shape in self._shapes:
            yield
            return
        with self:
            yield
        self._shapes.add(shape)  # not after a pass that did not end

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        replacement = _LOOKUPS.get(func)
        self._is_used |= replacement is not None
        return (replacement or func)(*args, **(kwargs or {}))


def _embedding(input: Tensor, weight: Tensor, padding_idx: int | None = None, *args: Any, **kwargs: Any) -> Tensor:
    """Look up rows of a table, as `torch.nn.functional.embedding`.

    Raises IndexError for an index outside of the table. The entry at `padding_idx` has no gradient.
    """
    count = weight.shape[0]
    inside = (input >= 0) & (input < count)
    output = F.embedding(torch.where(inside, input, OUTSIDE), weight, None, *args, **kwargs)
    if padding_idx is None:
        return output
    is_padding = input == padding_idx % count
    return torch.where(is_padding.unsqueeze(-1), output.detach(), output)


def _table_lookup(weight: Tensor, indices: Tensor, padding_idx: int = -1, *args: Any, **kwargs: Any) -> Tensor:
    """Look up rows of a table, as `torch.embedding`, in which a negative `padding_idx` means none."""
    scale_grad_by_freq = bool(args[0]) if args else bool(kwargs.get("scale_grad_by_freq", False))
    padding = None if padding_idx < 0 else padding_idx
    return _embedding(indices, weight, padding, scale_grad_by_freq=scale_grad_by_freq)


def _one_hot(tensor: Tensor, num_classes: int = -1) -> Tensor:
    """Return unit vectors int64 `[..., num_classes]`, as `F.one_hot`. Raises for a class outside of the range."""
    if num_classes < 0:
        return F.one_hot(tensor)
    zeros = torch.zeros(*tensor.shape, num_classes, dtype=torch.int64, device=tensor.device)
    return zeros.scatter(-1, tensor.unsqueeze(-1), 1)


def _refuse(*args: Any, **kwargs: Any) -> Tensor:
    """Raise RuntimeError for an operation whose rule under vmap mixes rows."""
    raise RuntimeError("index_fill of several rows fills elements of other rows. Use torch.where or scatter")


_LOOKUPS: dict[Any, Any] = {F.embedding: _embedding, torch.embedding: _table_lookup, F.one_hot: _one_hot}
_LOOKUPS |= dict.fromkeys((torch.index_fill, Tensor.index_fill, Tensor.index_fill_), _refuse)
