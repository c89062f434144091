"""All clients' samples in one place, where they are tensors that are alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import gcd, lcm

import torch
from torch import Tensor

from fastsam.fed.clients.pairs import ALIGNMENT
from fastsam.fed.clients.samples import Tensors

MAX_BYTES = 256 * 2**20  # largest number of bytes in addition to the user's tensors


@dataclass(frozen=True)
class PackedSamples:
    """The samples of all clients in a few tensors, each `[samples, ...]`: x and y, or the leaves of a tree. Between two
    clients there may be zeros."""

    tensors: Tensors
    offsets: Sequence[int]
    sizes: Sequence[int]

    @property
    def x(self) -> Tensor:
        return self.tensors[0]

    @property
    def y(self) -> Tensor:
        return self.tensors[-1]

    def labels(self) -> Tensor:
        """Return y of all clients, `[samples, ...]`, without the zeros between them."""
        return self.y if len(self.y) == sum(self.sizes) else self.y[_places(self.sizes, self.offsets).to(self.y.device)]


class StoredSamples(Sequence[Tensors]):
    """The clients of a store, as views that are made on first use: few of 100,000 clients train in a round."""

    def __init__(self, store: PackedSamples) -> None:
        self.store = store
        self._views: dict[int, Tensors] = {}

    def __len__(self) -> int:
        return len(self.store.sizes)

    def __getitem__(self, client: int) -> Tensors:  # type: ignore[override]
        views = self._views.get(client)
        if views is None:
            if not 0 <= client < len(self):
                raise IndexError(client)
            store = self.store
            begin, n = store.offsets[client], store.sizes[client]
            views = self._views[client] = tuple(t.narrow(0, begin, n) for t in store.tensors)
        return views


def pack_samples(clients: Sequence[Tensors]) -> tuple[Sequence[Tensors], PackedSamples | None]:
    """Return the clients' tensors as views of one store, each at a multiple of the alignment, and the store.

    Without a store the tensors are returned as they were: if samples of different clients differ in shape or dtype, or
    if they are too many for a second copy.
    """
    if len({tuple((t.shape[1:], t.dtype) for t in tensors) for tensors in clients}) > 1:
        return list(clients), None
    sizes = [len(tensors[0]) for tensors in clients]
    if sum(sizes) * sum(t[0].nbytes for t in clients[0]) > MAX_BYTES:
        return list(clients), None
    store = store_of(tuple(map(torch.cat, zip(*clients, strict=True))), sizes)
    return (list(clients), None) if store is None else (StoredSamples(store), store)


def store_of(tensors: Tensors, sizes: Sequence[int]) -> PackedSamples | None:
    """Return a store of the clients' samples, which follow each other in the tensors, or None for a bad size."""
    rows = [t[0].nbytes for t in tensors]
    if not all(rows):
        return None
    unit = lcm(*(ALIGNMENT // gcd(ALIGNMENT, row) for row in rows))
    offsets = [0, *accumulate(n + -n % unit for n in sizes)]
    if offsets[-1] * sum(rows) > MAX_BYTES:
        return None
    if offsets[-1] > len(tensors[0]):
        places = _places(sizes, offsets[:-1]).to(tensors[0].device)
        tensors = tuple(t.new_zeros(offsets[-1], *t.shape[1:]).index_copy_(0, places, t) for t in tensors)
    return PackedSamples(tensors, offsets[:-1], sizes)


def _places(sizes: Sequence[int], offsets: Sequence[int]) -> Tensor:
    """Return the indices of the samples of clients that begin at `offsets`, int64 `[samples]`."""
    counts = torch.tensor(sizes)
    shifts = torch.tensor(offsets) - (counts.cumsum(0) - counts)
    return torch.arange(sum(sizes)) + shifts.repeat_interleave(counts)
