"""The batches of stacked clients: `[rows, batch, ...]`, gathered for many batches and all rows at once where the rows
allow it."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fastsam.fed.clients.samples import Tensors
from fastsam.fed.common.transfer import to_device
from fastsam.fed.executors.task import BLOCK, Task


class SampleIndices(NamedTuple):
    """The samples of several rows.

    Attributes:
        tensors: samples, each `[n, ...]`, contiguous.
        places: indices of the samples of each row, int64 `[rows, samples]`, contiguous.
    """

    tensors: Tensors
    places: Tensor


class BatchGatherer:
    """The batches of clients that begin together and have the same number of samples and batch size, without
    augmentation.

    Samples and order equal `Task.batches`. Some batches at a time are gathered for all rows. The rows of a batch are
    contiguous in memory.
    """

    def __init__(self, tasks: Sequence[Task], sizes: Sequence[int]) -> None:
        """Take `sizes`, the number of samples of each batch of an epoch."""
        self.tasks, self.setup, self.size = tasks, tasks[0].setup, tasks[0].setup.options.batch_size
        self.epoch, self.samples = len(sizes), sum(sizes)  # numbers of batches and of samples in an epoch
        self._orders: tuple[int, Tensor] | None = None  # an epoch, and its orders
        self._block: tuple[tuple[int, int], list[Tensors]] | None = None  # epoch and number, and their batches

    def get(self, k: int) -> Tensors:
        """Return batch k of all rows. Neighbouring batches are gathered with it, so k should increase."""
        epoch, number = divmod(k, self.epoch)
        key, samples = (epoch, number // BLOCK), BLOCK * self.size
        if self._block is None or self._block[0] != key:
            self._block = None  # its memory can be used again
            orders = self._places(epoch)[:, key[1] * samples : (key[1] + 1) * samples]
            self._block = key, self._batches(orders)
        return self._block[1][number % BLOCK]

    def sample_indices(self, k: int, count: int) -> SampleIndices:
        """Return the samples of batches k to k + count - 1, which are of one epoch."""
        orders = self.orders(k, count)
        store = self.setup.population.clients.store
        if store is None:
            samples = tuple(t.flatten(0, 1) for t in self._gather(orders))
            return SampleIndices(samples, torch.arange(orders.numel(), device=samples[0].device).view(orders.shape))
        return SampleIndices(store.tensors, to_device(orders.contiguous(), store.tensors[0].device))

    def orders(self, k: int, count: int) -> Tensor:
        """Return the sample indices of `count` steps from step k on, on the host. They count in the store, or in the
        client's own data."""
        epoch, first = divmod(k, self.epoch)
        return self._places(epoch)[:, first * self.size : (first + count) * self.size]

    def _places(self, epoch: int) -> Tensor:
        """Return the indices of the samples of each row's epoch in order, int64 `[rows, samples]`. They count in the
        store, or in the client's own data."""
        if self._orders is None or self._orders[0] != epoch:
            first, n = self.tasks[0], self.samples
            if self.setup.options.shuffle:
                orders = self.setup.orders(first.round, [task.client for task in self.tasks], epoch)
                if n < first.samples:
                    orders = orders[:, :n]
            else:
                orders = torch.arange(n).expand(len(self.tasks), n)
            if (store := self.setup.population.clients.store) is not None:
                # `tensor` of a list takes its time
                offsets = array("q", [store.offsets[task.client] for task in self.tasks])
                orders = orders + torch.frombuffer(offsets, dtype=torch.int64).unsqueeze(1)
            self._orders = epoch, orders
        return self._orders[1]

    def _batches(self, orders: Tensor) -> list[Tensors]:
        """Return the batches of a block."""
        if self.setup.population.clients.store is None:
            return list(zip(*(part.split(self.size, 1) for part in self._gather(orders)), strict=True))
        return self._side_by_side(orders)

    def _side_by_side(self, orders: Tensor) -> list[Tensors]:
        """Return the batches of a block, each contiguous."""
        num_samples, batches = orders.shape[1] - orders.shape[1] % self.size, list[Tensors]()
        if num_samples:
            samples = self._gather(orders[:, :num_samples].unflatten(1, (-1, self.size)).transpose(0, 1))
            batches += zip(*(t.unbind() for t in samples), strict=True)
        if num_samples < orders.shape[1]:
            batches.append(self._gather(orders[:, num_samples:]))
        return batches

    def _gather(self, orders: Tensor) -> Tensors:
        """Return the samples of each row at `orders`, `[rows, samples]`. In a store, where this is one gather, `orders`
        may also be `[batches, rows, samples]`."""
        tasks, store = self.tasks, self.setup.population.clients.store
        first = tasks[0].tensors
        indices = to_device(orders.contiguous(), first[0].device)
        if store is not None:
            flat = indices.flatten()
            return tuple(t.index_select(0, flat).unflatten(0, orders.shape) for t in store.tensors)
        batch = tuple(t.new_empty(*orders.shape, *t.shape[1:]) for t in first)
        for row, task in enumerate(tasks):
            for out, t in zip(batch, task.tensors, strict=True):
                torch.index_select(t, 0, indices[row], out=out[row])
        return batch


def gather_keys(tasks: Sequence[Task]) -> Sequence[object]:
    """Return a key for each of some tasks of one round. Neighbours with equal keys can share a `BatchGatherer`."""
    population = tasks[0].setup.population
    if population.augment is not None:  # one batch by itself
        return range(len(tasks))
    if population.clients.store is not None:  # in it all samples are alike
        return [population.clients.sizes[task.client] for task in tasks]
    return [tuple(t.shape for t in task.tensors) for task in tasks]
