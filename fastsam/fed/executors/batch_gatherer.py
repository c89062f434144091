"""The batches of stacked clients: `[rows, batch, ...]`, gathered for many batches and all rows at once where the rows
allow it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fastsam.fed.clients.plan import Work, batches_at_once, orders_of
from fastsam.fed.clients.samples import Tensors
from fastsam.fed.common.transfer import to_device


class SampleIndices(NamedTuple):
    """The samples of several rows.

    Attributes:
        tensors: samples, each `[n, ...]`, contiguous.
        places: indices of the samples of each row, int64 `[rows, samples]`, contiguous.
    """

    tensors: Tensors
    places: Tensor


class BatchGatherer:
    """The batches of clients that have the same number of samples, without augmentation.

    Samples and order equal `Work.batches`. Some batches at a time are gathered for all rows. The rows of a batch are
    contiguous in memory.
    """

    def __init__(self, works: Sequence[Work]) -> None:
        self.works, self.size, self.sizes = works, works[0].options.batch_size, works[0].sizes
        self.samples, self.store = sum(self.sizes), works[0].clients.store
        self._at_once: int | None = None  # number of batches of a gather
        self._orders: tuple[int, Tensor] | None = None  # an epoch, and its orders
        self._block: tuple[tuple[int, int], list[Tensors]] | None = None  # epoch and number, and their batches

    def get(self, k: int) -> Tensors:
        """Return batch k of all rows. Neighbouring batches are gathered with it, so k should increase."""
        epoch, number = self.place(k)
        if self.sizes[number] < self.size and self.store is not None:
            return self.gather(self._places(epoch)[:, number * self.size :])
        if self._at_once is None:
            self._at_once = batches_at_once(self.size * len(self.works), self.works[0].tensors)
        key, samples = (epoch, number // self._at_once), self._at_once * self.size
        if self._block is None or self._block[0] != key:
            self._block = None  # its memory can be used again
            orders = self._places(epoch)[:, key[1] * samples : (key[1] + 1) * samples]
            self._block = key, self._batches(orders)
        return self._block[1][number % self._at_once]

    def place(self, k: int) -> tuple[int, int]:
        """Return the epoch of batch k, and the number of the batch in it."""
        return divmod(k, len(self.sizes))

    def sample_indices(self, k: int, count: int) -> SampleIndices:
        """Return the samples of batches k to k + count - 1, which are of one epoch."""
        orders = self.orders(k, count)
        if self.store is None:
            samples = tuple(t.flatten(0, 1) for t in self.gather(orders))
            return SampleIndices(samples, torch.arange(orders.numel(), device=samples[0].device).view(orders.shape))
        return SampleIndices(self.store.tensors, to_device(orders.contiguous(), self.store.tensors[0].device))

    def orders(self, k: int, count: int) -> Tensor:
        """Return the sample indices of `count` steps from step k on, on the host. They count in the store, or in the
        client's own data."""
        epoch, first = self.place(k)
        return self._places(epoch)[:, first * self.size : (first + count) * self.size]

    def _places(self, epoch: int) -> Tensor:
        """Return the indices of the samples of each row's epoch in order, int64 `[rows, samples]`. They count in the
        store, or in the client's own data."""
        if self._orders is None or self._orders[0] != epoch:
            self._orders = epoch, orders_of(self.works, epoch)
        return self._orders[1]

    def _batches(self, orders: Tensor) -> list[Tensors]:
        """Return the batches of a block. With a store a partial batch is gathered by itself."""
        if self.store is None:
            return list(zip(*(part.split(self.size, 1) for part in self.gather(orders)), strict=True))
        num_samples = orders.shape[1] - orders.shape[1] % self.size
        samples = self.gather(orders[:, :num_samples].unflatten(1, (-1, self.size)).transpose(0, 1))
        return list(zip(*(t.unbind() for t in samples), strict=True))  # each contiguous

    def gather(self, orders: Tensor) -> Tensors:
        """Return the samples of each row at `orders`, `[rows, samples]`. In a store, where this is one gather, `orders`
        may also be `[batches, rows, samples]`."""
        first, store = self.works[0].tensors, self.store
        indices = to_device(orders.contiguous(), first[0].device)
        if store is not None:
            flat = indices.flatten()
            return tuple(t.index_select(0, flat).view(*orders.shape, *t.shape[1:]) for t in store.tensors)
        batch = tuple(t.new_empty(*orders.shape, *t.shape[1:]) for t in first)
        for row, work in enumerate(self.works):
            for out, t in zip(batch, work.tensors, strict=True):
                torch.index_select(t, 0, indices[row], out=out[row])
        return batch


def gather_together(gatherers: Sequence[BatchGatherer], steps: Sequence[int]) -> Tensors | None:
    """Return a batch of each of several neighbours, all of one size, next to each other, in one gather, or None without
    a store. `steps` has the number of each batch."""
    first = gatherers[0]
    if first.store is None:
        return None
    return first.gather(torch.cat([gatherer.orders(k, 1) for gatherer, k in zip(gatherers, steps, strict=True)]))


def gather_keys(works: Sequence[Work]) -> Sequence[object]:
    """Return a key for each of some works of one round. Neighbours with equal keys can share a `BatchGatherer`."""
    population = works[0].orders.population
    if population.augment is not None:  # one batch by itself
        return range(len(works))
    if population.clients.store is not None:  # in it all samples are alike
        return [work.samples for work in works]
    return [tuple(t.shape for t in work.tensors) for work in works]
