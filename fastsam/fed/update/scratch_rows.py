"""Copies side by side of rows that are not neighbours, so that they can take a step together."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fastsam.fed.common.transfer import to_device
from fastsam.fed.update.rows import Rows, RunFacts
from fastsam.fed.update.steps import Key

_INDICES = 256  # cached sets of rows that are not neighbours; the same sets come every round


class ScratchRows:
    """Copies side by side of some of the rows of a memory, at most `n`."""

    def __init__(self, rows: Rows, setup: RunFacts, n: int) -> None:
        self.source, self.rows = rows.memory, Rows(setup, n, copies=True)
        self._indices: dict[tuple[int, ...], Tensor] = {}

    def gather(self, index: Tensor, key: Key) -> Rows:
        """Return copies of the rows at `index` (int64 `[rows]` on the device), ready for steps of a key."""
        n, target = len(index), self.rows.memory
        part = self.rows.part(0, n)
        target.start = self.source.start
        for name in self.source.arena.names:
            torch.index_select(self.source.field(name), 0, index, out=target.field(name)[:n])
        for name, x in self.source.numbers.items():
            torch.index_select(x, 0, index, out=target.number(name, x.shape[1])[:n])
        for name, x in self.source.scalars.items():
            torch.index_select(x, 0, index, out=target.scalars[name][:n])
        part.select(key)
        return part

    def put_back(self, index: Tensor, part: Rows) -> None:
        """Copy what a step may have changed to the rows at `index`."""
        assert part.key is not None
        read = part.key.given - {*part.key.kind.outputs}
        for name in part.memory.arena.names:
            if name not in read:
                self.source.field(name).index_copy_(0, index, part.memory.field(name)[: part.n])
        for name in part.memory.numbers:
            self.source.number(name).index_copy_(0, index, part.number(name))
        for name in ("losses", "counts"):
            if name in self.source.scalars:
                self.source.scalars[name].index_copy_(0, index, part.memory.scalars[name][: part.n])

    def index_of(self, places: Sequence[int]) -> Tensor:
        """Return the index of rows on the device."""
        key = tuple(places)
        if key not in self._indices:
            if len(self._indices) == _INDICES:
                self._indices.clear()
            self._indices[key] = to_device(torch.tensor(key), self.source.device)
        return self._indices[key]
