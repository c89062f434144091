"""The rows in which stacked clients train: their forms, their beginnings, and copies side by side of rows that are not
neighbours."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fastsam.fed.common.transfer import to_device
from fastsam.fed.executors.client_block import ClientBlock, neighbours, slots_of, tasks_of
from fastsam.fed.executors.row_state import RowSlice, RowState
from fastsam.fed.executors.task import Setup, Task

_INDICES = 256  # cached sets of rows that are not neighbours; the same sets come every round
# The fields that a step writes. The others are only read.
_UPDATED_FIELDS = ("z", "w", "momentum", "dual", "eps", "path", "last")


class StackedRows:
    """`slots` rows, and the same number of rows for copies once they are needed."""

    def __init__(self, setup: Setup, slots: int) -> None:
        self.setup, self.slots = setup, slots
        self.rows = RowState(setup, slots)
        self.scratch: RowState | None = None
        self._last_numbers: tuple[slice, list[tuple[float, ...]]] | None = None
        self._forms: dict[tuple[int, int], RowSlice] = {}
        self._indices: dict[tuple[int, ...], Tensor] = {}

    def row_slice(self, blocks: Sequence[ClientBlock]) -> RowSlice:
        """Return the slice of neighbouring rows."""
        begin, end = blocks[0].slot, blocks[-1].end
        row_slice = self._forms.get((begin, end))
        if row_slice is None:
            row_slice = self._forms[begin, end] = RowSlice(self.rows, slice(begin, end))
        return row_slice

    def begin(self, blocks: Sequence[ClientBlock], start: Tensor) -> None:
        """Begin a round in neighbouring rows of one variant. Values that they share are written to all of them at
        once."""
        row_slice, tasks = self.row_slice(blocks), tasks_of(blocks)
        first = tasks[0]
        is_shared = all(task.update is first.update for task in tasks)
        updates = [first.update] if is_shared else [task.update for task in tasks]
        numbers = [self.rows.numbers(update, first.lr) for update in updates]
        if self._last_numbers != (row_slice.part, numbers):  # most calls write the numbers of the last call
            row_slice.hparams.copy_(
                to_device(torch.tensor(numbers, dtype=torch.float64).unsqueeze(1), row_slice.hparams.device)
            )
        self._last_numbers = None if blocks[0].variant.rewrites else (row_slice.part, numbers)
        row_slice.losses.zero_()
        row_slice.set_variant(blocks[0].variant)
        starts = vectors_of(tasks, "start")
        row_slice.begin(start if starts is None else starts)
        if starts is not None:
            row_slice.field("begin").copy_(starts)
        for name in ("gradient_offset", "dual", "server_perturbation", *blocks[0].variant.vectors):
            vectors = vectors_of(tasks, name)
            if vectors is not None:
                row_slice.field(name).copy_(vectors)
        row_slice.vectors = {name: row_slice.field(name) for name in blocks[0].variant.vectors}

    def gather(self, blocks: Sequence[ClientBlock]) -> RowSlice:
        """Return the blocks' rows next to each other, ready for a step: the rows themselves, or copies, which
        `put_back` copies back."""
        row_slice = self.row_slice(blocks) if neighbours(blocks) else self._copy_rows(blocks)
        has_server_perturbation = blocks[0].tasks[0].update.server_perturbation is not None
        row_slice.s = row_slice.field("server_perturbation") if has_server_perturbation else None
        row_slice.vectors = {name: row_slice.field(name) for name in blocks[0].variant.vectors}
        row_slice.set_variant(blocks[0].variant)
        if blocks[0].variant.has_schedule:
            row_slice.set_schedule([t.lr_and_radius(block.k, block.steps) for block in blocks for t in block.tasks])
        return row_slice

    def _copy_rows(self, blocks: Sequence[ClientBlock]) -> RowSlice:
        if self.scratch is None:
            self.scratch = RowState(self.setup, self.slots)
        index = self._index(blocks)
        row_slice = RowSlice(self.scratch, slice(0, len(index)))
        for name in self.rows.arena.names:
            torch.index_select(self.rows.field(name), 0, index, out=row_slice.field(name))
        torch.index_select(self.rows.hparams, 0, index, out=row_slice.hparams)
        torch.index_select(self.rows.losses, 0, index, out=row_slice.losses)
        return row_slice

    def put_back(self, blocks: Sequence[ClientBlock], row_slice: RowSlice) -> None:
        """Copy the results of a step from copied rows to the rows."""
        if row_slice.rows is self.rows:
            return
        index = self._index(blocks)
        for name in _UPDATED_FIELDS:
            if name in self.rows.arena or name in row_slice.rows.arena:
                self.rows.field(name).index_copy_(0, index, row_slice.field(name))
        self.rows.losses.index_copy_(0, index, row_slice.losses)

    def _index(self, blocks: Sequence[ClientBlock]) -> Tensor:
        slots = tuple(slots_of(blocks))
        if slots not in self._indices:
            if len(self._indices) == _INDICES:
                self._indices.clear()
            self._indices[slots] = to_device(torch.tensor(slots), self.setup.device)
        return self._indices[slots]


def vectors_of(tasks: Sequence[Task], name: str) -> Tensor | None:
    """Return a vector of the local updates of tasks, all of one kind, in their order: `[row_size]` if all share it,
    else `[tasks, row_size]`."""
    first, last = tasks[0], tasks[-1]
    v: Tensor | None = getattr(first.update, name)
    if v is None or all(task.update is first.update for task in tasks):
        return v if v is None or v.dim() == 1 else v[first.row : last.row + 1]
    return torch.stack([vector for task in tasks if (vector := task.vector(name)) is not None])
