"""All clients' samples in one place, where they are pairs of tensors that are alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import gcd, lcm

import torch
from torch import Tensor

from fastsam.fed.clients.pairs import ALIGNMENT, Pair

MAX_BYTES = 256 * 2**20  # largest number of bytes in addition to the user's tensors


@dataclass(frozen=True)
class PackedSamples:
    """The samples of all clients in one pair of tensors, `[samples, ...]`. Between two clients there may be zeros."""

    x: Tensor
    y: Tensor
    offsets: Sequence[int]
    sizes: Sequence[int]

    def labels(self) -> Tensor:
        """Return y of all clients, `[samples, ...]`, without the zeros between them."""
        return self.y if len(self.y) == sum(self.sizes) else self.y[_places(self.sizes, self.offsets).to(self.y.device)]


class StoredPairs(Sequence[Pair]):
    """The clients of a store, as views that are made on first use: few of 100,000 clients train in a round."""

    def __init__(self, store: PackedSamples) -> None:
        self.store = store
        self._views: dict[int, Pair] = {}

    def __len__(self) -> int:
        return len(self.store.sizes)

    def __getitem__(self, client: int) -> Pair:  # type: ignore[override]
        pair = self._views.get(client)
        if pair is None:
            if not 0 <= client < len(self):
                raise IndexError(client)
            store = self.store
            begin, n = store.offsets[client], store.sizes[client]
            pair = self._views[client] = store.x.narrow(0, begin, n), store.y.narrow(0, begin, n)
        return pair


def pack_pairs(pairs: Sequence[Pair]) -> tuple[Sequence[Pair], PackedSamples | None]:
    """Return the pairs as views of one store, each at a multiple of the alignment, and the store.

    Without a store the pairs are returned as they were: if samples of different clients differ in shape or dtype, or if
    they are too many for a second copy.
    """
    if len({(x.shape[1:], x.dtype, y.shape[1:], y.dtype) for x, y in pairs}) > 1:
        return list(pairs), None
    sizes = [len(y) for _, y in pairs]
    if sum(sizes) * sum(t[0].nbytes for t in pairs[0]) > MAX_BYTES:
        return list(pairs), None
    store = store_of(torch.cat([x for x, _ in pairs]), torch.cat([y for _, y in pairs]), sizes)
    return (list(pairs), None) if store is None else (StoredPairs(store), store)


def store_of(x: Tensor, y: Tensor, sizes: Sequence[int]) -> PackedSamples | None:
    """Return a store of the clients' samples, which follow each other in x and y, or None for a bad size."""
    rows = [t[0].nbytes for t in (x, y)]
    if not all(rows):
        return None
    unit = lcm(*(ALIGNMENT // gcd(ALIGNMENT, row) for row in rows))
    offsets = [0, *accumulate(n + -n % unit for n in sizes)]
    if offsets[-1] * sum(rows) > MAX_BYTES:
        return None
    if offsets[-1] > len(y):
        places = _places(sizes, offsets[:-1])
        x, y = (t.new_zeros(offsets[-1], *t.shape[1:]).index_copy_(0, places.to(t.device), t) for t in (x, y))
    return PackedSamples(x, y, offsets[:-1], sizes)


def _places(sizes: Sequence[int], offsets: Sequence[int]) -> Tensor:
    """Return the indices of the samples of clients that begin at `offsets`, int64 `[samples]`."""
    counts = torch.tensor(sizes)
    shifts = torch.tensor(offsets) - (counts.cumsum(0) - counts)
    return torch.arange(sum(sizes)) + shifts.repeat_interleave(counts)
