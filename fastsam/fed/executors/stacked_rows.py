"""The rows in which stacked clients train: their forms, their beginnings, and copies side by side of rows that are not
neighbours."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fastsam.fed.common.transfer import to_device
from fastsam.fed.executors.client_block import ClientBlock, are_neighbours, slots_of, tasks_of
from fastsam.fed.executors.local_rows import LocalRows
from fastsam.fed.executors.row_memory import RowMemory
from fastsam.fed.executors.task import Setup, vectors_of
from fastsam.fed.update.variant import StepVariant

_INDICES = 256  # cached sets of rows that are not neighbours; the same sets come every round
# The fields that a step writes. The others are only read.
_UPDATED_FIELDS = ("z", "w", "dual", "eps", "path", "last")


class StackedRows:
    """`slots` rows, and the same number of rows for copies once they are needed."""

    def __init__(self, setup: Setup, slots: int) -> None:
        self.setup, self.slots = setup, slots
        self.memory = RowMemory(setup, slots)
        self.scratch: RowMemory | None = None
        self._windows: dict[tuple[int, int], LocalRows] = {}
        self._indices: dict[tuple[int, ...], Tensor] = {}

    def window(self, begin: int, end: int, variant: StepVariant) -> LocalRows:
        """Return the rows `begin` to `end - 1`, ready for steps of `variant`."""
        rows = self._windows.get((begin, end))
        if rows is None:
            rows = self._windows[begin, end] = LocalRows(self.memory, slice(begin, end), copies=True)
        rows.set_variant(variant)
        return rows

    def neighbours(self, blocks: Sequence[ClientBlock]) -> LocalRows:
        """Return neighbouring rows, ready for steps of the blocks' variant."""
        return self.window(blocks[0].slot, blocks[-1].end, blocks[0].variant)

    def set_schedule(self, block: ClientBlock) -> None:
        """Write the learning rates of a block's next step."""
        self.neighbours([block]).set_schedule([task.lr_of_step(block.k, block.steps) for task in block.tasks])

    def begin(self, blocks: Sequence[ClientBlock], start: Tensor) -> LocalRows:
        """Begin a round in neighbouring rows of one variant, and return the rows."""
        rows, tasks = self.neighbours(blocks), tasks_of(blocks)
        own_starts = vectors_of(tasks, "start")
        rows.begin(tasks, start if own_starts is None else own_starts)
        return rows

    def gather(self, blocks: Sequence[ClientBlock]) -> LocalRows:
        """Return the blocks' rows next to each other, ready for a step: the rows themselves, or copies, which
        `put_back` copies back."""
        rows = self.neighbours(blocks) if are_neighbours(blocks) else self._copy_rows(blocks)
        if blocks[0].variant.has_schedule:
            rows.set_schedule([t.lr_of_step(block.k, block.steps) for block in blocks for t in block.tasks])
        return rows

    def _copy_rows(self, blocks: Sequence[ClientBlock]) -> LocalRows:
        if self.scratch is None:
            self.scratch = RowMemory(self.setup, self.slots)
        index = self._index(blocks)
        rows = LocalRows(self.scratch, slice(0, len(index)), copies=True)
        for name in self.memory.arena.names:
            torch.index_select(self.memory.field(name), 0, index, out=rows.field(name))
        for source, copy in zip(_others(self.memory), _others(rows), strict=True):
            torch.index_select(source, 0, index, out=copy)
        rows.set_variant(blocks[0].variant)
        return rows

    def put_back(self, blocks: Sequence[ClientBlock], rows: LocalRows) -> None:
        """Copy the results of a step from copied rows to the rows."""
        if rows.memory is self.memory:
            return
        index = self._index(blocks)
        for name in (*_UPDATED_FIELDS, *filter(None, rows.rule.fields)):
            if name in self.memory.arena or name in rows.memory.arena:
                self.memory.field(name).index_copy_(0, index, rows.field(name))
        self.memory.losses.index_copy_(0, index, rows.losses)
        if self.memory.counts is not None and rows.counts is not None:
            self.memory.counts.index_copy_(0, index, rows.counts)

    def _index(self, blocks: Sequence[ClientBlock]) -> Tensor:
        slots = tuple(slots_of(blocks))
        if slots not in self._indices:
            if len(self._indices) == _INDICES:
                self._indices.clear()
            self._indices[slots] = to_device(torch.tensor(slots), self.setup.device)
        return self._indices[slots]


def _others(rows: RowMemory | LocalRows) -> list[Tensor]:
    """Return the tensors of rows that are not in the arena."""
    tensors = rows.hparams, rows.losses, rows.norms, rows.counts
    return [t for t in tensors if t is not None]
