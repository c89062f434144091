"""The batches of stacked clients: `[rows, batch, ...]`, gathered for many batches and all rows at once where the rows
allow it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from fastsam.fed.clients.samples import Tensors
from fastsam.fed.common import seeds
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


class SampleOrders:
    """The orders of the samples of clients that begin together, drawn for all of them in one call an epoch."""

    def __init__(self, tasks: Sequence[Task]) -> None:
        self.tasks = tasks
        self._epochs: WeakValueDictionary[int, Tensor] = WeakValueDictionary()  # epochs in which a client still is

    def of_epoch(self, epoch: int) -> Tensor:
        """Return the indices of the samples of each client in an epoch, int64 `[clients, longest]` on the host. They
        count in the store, or in the client's own data. The first elements of a row are valid."""
        orders = self._epochs.get(epoch)
        if orders is None:
            first, sizes = self.tasks[0], [task.samples for task in self.tasks]
            store, longest = first.setup.population.clients.store, max(sizes)
            offsets = [0 if store is None else store.offsets[task.client] for task in self.tasks]
            orders = self._epochs[epoch] = torch.empty(len(sizes), longest, dtype=torch.int64)
            lines = [
                (task.client, n, n, row * longest, offset)
                for row, (task, n, offset) in enumerate(zip(self.tasks, sizes, offsets, strict=True))
            ]
            seeds.write_orders(orders.view(-1), lines, first.setup.order_seed(first.round, epoch))
        return orders


class BatchGatherer:
    """The batches of clients that begin together and have the same number of samples and batch size, without
    augmentation.

    Samples and order equal `Task.batches`. Some batches at a time are gathered for all rows. The rows of a batch are
    contiguous in memory.
    """

    def __init__(
        self, tasks: Sequence[Task], sizes: Sequence[int], orders: SampleOrders | None = None, begin: int = 0
    ) -> None:
        """Take `sizes`, the number of samples of each batch of an epoch. The tasks are in `orders` from `begin` on."""
        self.tasks, self.setup, self.size = tasks, tasks[0].setup, tasks[0].setup.options.batch_size
        self.sizes, self.samples = sizes, sum(sizes)
        self.sample_orders, self.begin, self.end = orders or SampleOrders(tasks), begin, begin + len(tasks)
        self._orders: tuple[int, Tensor] | None = None  # an epoch, and its orders
        self._block: tuple[tuple[int, int], list[Tensors]] | None = None  # epoch and number, and their batches

    def get(self, k: int) -> Tensors:
        """Return batch k of all rows. Neighbouring batches are gathered with it, so k should increase."""
        epoch, number = self.place(k)
        if self.sizes[number] < self.size and self.setup.population.clients.store is not None:
            return self.gather(self._places(epoch)[:, number * self.size :])
        key, samples = (epoch, number // BLOCK), BLOCK * self.size
        if self._block is None or self._block[0] != key:
            self._block = None  # its memory can be used again
            orders = self._places(epoch)[:, key[1] * samples : (key[1] + 1) * samples]
            self._block = key, self._batches(orders)
        return self._block[1][number % BLOCK]

    def place(self, k: int) -> tuple[int, int]:
        """Return the epoch of batch k, and the number of the batch in it."""
        return divmod(k, len(self.sizes))

    def sample_indices(self, k: int, count: int) -> SampleIndices:
        """Return the samples of batches k to k + count - 1, which are of one epoch."""
        orders = self.orders(k, count)
        store = self.setup.population.clients.store
        if store is None:
            samples = tuple(t.flatten(0, 1) for t in self.gather(orders))
            return SampleIndices(samples, torch.arange(orders.numel(), device=samples[0].device).view(orders.shape))
        return SampleIndices(store.tensors, to_device(orders.contiguous(), store.tensors[0].device))

    def orders(self, k: int, count: int) -> Tensor:
        """Return the sample indices of `count` steps from step k on, on the host. They count in the store, or in the
        client's own data."""
        epoch, first = self.place(k)
        return self._places(epoch)[:, first * self.size : (first + count) * self.size]

    def orders_of_epoch(self, epoch: int) -> Tensor:
        """Return the orders of an epoch of all clients that began together; see `SampleOrders.of_epoch`."""
        if self._orders is None or self._orders[0] != epoch:
            self._orders = epoch, self.sample_orders.of_epoch(epoch)
        return self._orders[1]

    def _places(self, epoch: int) -> Tensor:
        """Return the indices of the samples of each row's epoch in order, int64 `[rows, samples]`. They count in the
        store, or in the client's own data."""
        return self.orders_of_epoch(epoch)[self.begin : self.end, : self.samples]

    def _batches(self, orders: Tensor) -> list[Tensors]:
        """Return the batches of a block. With a store a partial batch is gathered by itself."""
        if self.setup.population.clients.store is None:
            return list(zip(*(part.split(self.size, 1) for part in self.gather(orders)), strict=True))
        num_samples = orders.shape[1] - orders.shape[1] % self.size
        samples = self.gather(orders[:, :num_samples].unflatten(1, (-1, self.size)).transpose(0, 1))
        return list(zip(*(t.unbind() for t in samples), strict=True))  # each contiguous

    def gather(self, orders: Tensor) -> Tensors:
        """Return the samples of each row at `orders`, `[rows, samples]`. In a store, where this is one gather, `orders`
        may also be `[batches, rows, samples]`."""
        tasks, store = self.tasks, self.setup.population.clients.store
        first = tasks[0].tensors
        indices = to_device(orders.contiguous(), first[0].device)
        if store is not None:
            flat = indices.flatten()
            return tuple(t.index_select(0, flat).view(*orders.shape, *t.shape[1:]) for t in store.tensors)
        batch = tuple(t.new_empty(*orders.shape, *t.shape[1:]) for t in first)
        for row, task in enumerate(tasks):
            for out, t in zip(batch, task.tensors, strict=True):
                torch.index_select(t, 0, indices[row], out=out[row])
        return batch


def gather_together(gatherers: Sequence[BatchGatherer], steps: Sequence[int]) -> Tensors | None:
    """Return a batch of each of several neighbours, next to each other, in one gather. Return None without a store, or
    if they did not begin together, or are at different places of their epochs. `steps` has the number of each batch."""
    first, last = gatherers[0], gatherers[-1]
    places = {(id(g.sample_orders), *g.place(k)) for g, k in zip(gatherers, steps, strict=True)}
    if len(places) > 1 or first.setup.population.clients.store is None:
        return None
    epoch, number = first.place(steps[0])
    begin = number * first.size
    return first.gather(first.orders_of_epoch(epoch)[first.begin : last.end, begin : begin + first.sizes[number]])


def gather_keys(tasks: Sequence[Task]) -> Sequence[object]:
    """Return a key for each of some tasks of one round. Neighbours with equal keys can share a `BatchGatherer`."""
    population = tasks[0].setup.population
    if population.augment is not None:  # one batch by itself
        return range(len(tasks))
    if population.clients.store is not None:  # in it all samples are alike
        return [population.clients.sizes[task.client] for task in tasks]
    return [tuple(t.shape for t in task.tensors) for task in tasks]
