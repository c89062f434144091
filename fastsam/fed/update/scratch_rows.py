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
    """Copies side by side of rows that are not neighbours."""

    def __init__(self, rows: Rows, setup: RunFacts) -> None:
        self.source, self.rows = rows.memory, Rows(setup, rows.n, copies=True)
        self._indices: dict[tuple[int, ...], Tensor] = {}

    def gather(self, places: Sequence[int], key: Key) -> Rows:
        """Return copies of the rows at `places`, ready for steps of a key."""
        index, target = self._index(places), self.rows.memory
        part = self.rows.part(0, len(places))
        target.start = self.source.start
        for name in self.source.arena.names:
            torch.index_select(self.source.field(name), 0, index, out=target.field(name)[: len(places)])
        for name, x in self.source.numbers.items():
            torch.index_select(x, 0, index, out=target.number(name, x.shape[1])[: len(places)])
        for name, x in self.source.scalars.items():
            torch.index_select(x, 0, index, out=target.scalars[name][: len(places)])
        part.key = None  # the common start may be new
        part.select(key)
        return part

    def put_back(self, places: Sequence[int], part: Rows) -> None:
        """Copy what a step may have changed back to the rows."""
        assert part.key is not None
        index, read = self._index(places), part.key.given - {*part.key.kind.outputs}
        for name in part.memory.arena.names:
            if name not in read:
                self.source.field(name).index_copy_(0, index, part.memory.field(name)[: part.n])
        for name in part.memory.numbers:
            self.source.number(name).index_copy_(0, index, part.number(name))
        for name in ("losses", "counts"):
            if name in self.source.scalars:
                self.source.scalars[name].index_copy_(0, index, part.memory.scalars[name][: part.n])

    def _index(self, places: Sequence[int]) -> Tensor:
        key = tuple(places)
        if key not in self._indices:
            if len(self._indices) == _INDICES:
                self._indices.clear()
            self._indices[key] = to_device(torch.tensor(key), self.source.device)
        return self._indices[key]
