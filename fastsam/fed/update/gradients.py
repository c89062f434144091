"""The gradients of one backward pass of n rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fastsam.arena import Layout


class Gradients:
    """The gradients of one backward pass, where autograd left them, and the table of the parameters that have one."""

    def __init__(self, tensors: list[Tensor], slots: tuple[int, ...], table: Tensor) -> None:
        self.tensors, self.slots, self.table = tensors, slots, table

    def norms(self, rows: int) -> Tensor:
        """Return the norms of the gradients of each row, float64 `[rows]`."""
        squares = [g.reshape(rows, -1).double().square().sum(1) for g in self.tensors]
        return torch.stack(squares).sum(0).sqrt()

    def add_to(self, total: Tensor, layout: Layout, share: float = 1.0) -> None:
        """Add `share` times the gradients to rows `[rows, row_size]`."""
        views = layout.views(total)
        for slot, g in zip(self.slots, self.tensors, strict=True):
            views[slot].add_(g, alpha=share)

    @classmethod
    def join(cls, parts: Sequence[Gradients], layout: Layout) -> Gradients:
        """Return the gradients of several parts of the rows, of the same parameters, next to each other."""
        first, rows, tensors = parts[0], sum(len(part.tensors[0]) for part in parts), []
        for slot, column in zip(first.slots, zip(*(part.tensors for part in parts), strict=True), strict=True):
            segment, g = layout.segments[slot], column[0]
            strides = (segment.length, *segment.stride)
            out = torch.empty_strided((rows, *segment.shape), strides, dtype=g.dtype, device=g.device)
            tensors.append(torch.cat(column, out=out))
        return cls(tensors, first.slots, first.table)

    def like(self, template: Gradients) -> list[Tensor]:
        """Return the tensors for the parameters of `template`, zeros where these have none."""
        if self.slots == template.slots:
            return self.tensors
        by_slot = dict(zip(self.slots, self.tensors, strict=True))
        return [by_slot.get(i, torch.zeros_like(t)) for i, t in zip(template.slots, template.tensors, strict=True)]
