"""The samples of clients in a round: orders, batches and seeds. No other module orders samples or divides epochs."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, islice, repeat
from typing import Any

import torch
from torch import Tensor

from fastsam.fed.clients.all_clients import Clients
from fastsam.fed.clients.population import Population, apply_augment
from fastsam.fed.clients.samples import ClientDataset, Tensors
from fastsam.fed.common import seeds
from fastsam.fed.common.transfer import to_device

BLOCK = 32  # batches that are augmented at once, and gathered at once if they are small
MAX_GATHERED = 64 * 2**20  # most bytes that are gathered at once
_ALIGNMENT = 256  # bytes: libraries' rounding depends on where a batch begins, but not beyond such a multiple


@dataclass(frozen=True)
class SampleOptions:
    """The options of a run for the samples of its clients, by the names that `fed.run` has for them.

    Attributes:
        local_steps: number of local steps of every client, in place of epochs.
        drop_last: an epoch ends with its last whole batch, unless it has only a partial batch. Otherwise the last batch
            has the rest, at its exact shape.
        shuffle: use a new order in every epoch; otherwise the stored one.
    """

    local_epochs: int = 1
    local_steps: int | None = None
    batch_size: int = 16
    drop_last: bool = False
    shuffle: bool = True
    seed: int = 0

    def sizes_of(self, samples: int) -> tuple[int, ...]:
        """Return the number of samples of each batch of an epoch, for a client with `samples` samples."""
        return _sizes_of(samples, self.batch_size, self.drop_last)

    def epochs_of(self, samples: int) -> int:
        """Return the number of epochs that such a client begins in a round."""
        return self.local_epochs if self.local_steps is None else -(-self.local_steps // len(self.sizes_of(samples)))

    def steps_of(self, samples: int) -> int:
        """Return the number of local steps of such a client in a round."""
        return self.local_steps or self.local_epochs * len(self.sizes_of(samples))

    def samples_of(self, samples: int) -> int:
        """Return the number of samples in all these steps together."""
        return sum(self.batch_sizes(samples))

    def batch_sizes(self, samples: int) -> Sequence[int]:
        """Return the number of samples of each of these steps."""
        return (self.sizes_of(samples) * self.epochs_of(samples))[: self.local_steps]


@lru_cache(maxsize=2**12)
def _sizes_of(samples: int, batch_size: int, drop_last: bool) -> tuple[int, ...]:
    num_full, last_size = divmod(samples, batch_size)
    return (batch_size,) * num_full + (last_size,) * (last_size > 0 and not (drop_last and num_full > 0))


class Orders:
    """The orders of the samples of some clients in a round, drawn for all of them in one call an epoch.

    Attributes, from `measure` on:
        sizes: number of samples of each client.
        kept: number of samples of each client in an epoch.
        epochs: number of epochs of each client.
        begins: place of each client in `indices`, and the end of the last one.
        indices: the indices of the samples of all clients, int64 `[.]` on the host: of each client one epoch after the
            other. They count in the store, or in the client's own data. From `draw` on.
    """

    sizes: Sequence[int]
    kept: Sequence[int]
    epochs: Sequence[int]
    begins: Sequence[int] = ()
    indices: Tensor | None = None

    def __init__(self, population: Population, options: SampleOptions, round: int, clients: Sequence[int]) -> None:
        self.population, self.options, self.round, self.clients = population, options, round, clients

    def works(self) -> list[Work]:
        """Return the work of each of the clients."""
        return [Work(client, self, place, self.options) for place, client in enumerate(self.clients)]

    def measure(self) -> None:
        """Compute the numbers of samples, which must be known."""
        options = self.options
        self.sizes = list(map(self.population.clients.sizes.__getitem__, self.clients))
        numbers = {n: (sum(options.sizes_of(n)), options.epochs_of(n)) for n in set(self.sizes)}
        self.kept, self.epochs = zip(*map(numbers.__getitem__, self.sizes), strict=True)
        self.begins = [0, *accumulate(map(operator.mul, self.kept, self.epochs))]

    def draw(self) -> Tensor:
        """Return `indices`, which are drawn at the first call."""
        if self.indices is None:
            self.indices = torch.empty(self.begins[-1], dtype=torch.int64, device="cpu")
            store = self.population.clients.store
            firsts = repeat(0) if store is None else map(store.offsets.__getitem__, self.clients)
            lines = list(zip(self.clients, self.sizes, self.kept, self.begins, firsts, strict=False))
            for epoch in range(max(self.epochs)):
                if epoch:
                    left = [line for line, epochs in zip(lines, self.epochs, strict=True) if epoch < epochs]
                    lines_of_epoch = [(i, n, kept, begin + epoch * kept, first) for i, n, kept, begin, first in left]
                else:
                    lines_of_epoch = lines
                seeds.write_orders(self.indices, lines_of_epoch, self._seed(epoch))
        return self.indices

    def of(self, place: int, epoch: int) -> Tensor:
        """Return the indices of a client's samples in an epoch, int64 `[samples]` on the host."""
        kept, client = self.kept[place], self.clients[place]
        if epoch < self.epochs[place]:
            begin = self.begins[place] + epoch * kept
            return self.draw()[begin : begin + kept]
        out = torch.empty(kept, dtype=torch.int64, device="cpu")  # epochs beyond those of the run, for a loop
        first = first_index(self.population.clients, client)
        seeds.write_orders(out, [(client, self.sizes[place], kept, 0, first)], self._seed(epoch))
        return out

    def _seed(self, epoch: int) -> tuple[int | str, ...]:
        """Return what the orders of an epoch are drawn from, or nothing if samples come in their stored order."""
        return (self.options.seed, "shuffle", self.round, epoch) if self.options.shuffle else ()


@dataclass(slots=True)
class Work:
    """The samples of one client in one round.

    Attributes:
        client: id of the client.
        orders: orders of its samples, shared by clients that are planned together.
        place: place of the client among them.
        options: options of the run, or of the epochs that a loop requests.
        epochs_done: number of epochs that the client has begun before in this round.
        dataset: its samples if they come in batches, from `open` on.
    """

    client: int
    orders: Orders
    place: int
    options: SampleOptions
    epochs_done: int = 0
    dataset: ClientDataset | None = None

    def more(self, epochs_done: int, epochs: int | None = None) -> Work:
        """Return the work after `epochs_done` epochs: a number of epochs, or the run's if `epochs` is None."""
        options = self.options if epochs is None else replace(self.options, local_epochs=epochs, local_steps=None)
        return replace(self, options=options, epochs_done=epochs_done)

    def open(self) -> None:
        """Load the client's samples if they come in batches."""
        if self.clients.is_batched:
            self.dataset = self.clients[self.client]
            if not self.orders.begins:  # the number of samples was unknown
                self.orders.measure()

    @property
    def clients(self) -> Clients:
        return self.orders.population.clients

    @property
    def tensors(self) -> Tensors:
        """The samples of the client, if they are in memory. With a store they are in it from `store.offsets[client]`
        on."""
        return self.clients.tensors[self.client]

    @property
    def seed(self) -> int:
        """Seed of the passes, the augmentation and the reading of the client's samples. The order of the samples has
        another seed (`Orders`)."""
        return seeds.derive(self.options.seed, "client", self.orders.round, self.client)

    # --- numbers of samples ---

    @property
    def samples(self) -> int:
        """The number of samples of the client."""
        return self.orders.population.clients.sizes[self.client]

    @property
    def sizes(self) -> Sequence[int]:
        """The number of samples of each batch of an epoch."""
        return self.options.sizes_of(self.samples)

    @property
    def epochs(self) -> range:
        """The epochs that it begins."""
        return range(self.epochs_done, self.epochs_done + self.options.epochs_of(self.samples))

    def batch_sizes(self) -> Sequence[int]:
        """Return the number of samples of each of its batches, in order."""
        return self.options.batch_sizes(self.samples)

    # --- batches ---

    def order(self, epoch: int) -> Tensor:
        """Return the indices of its samples in an epoch, int64 `[samples]` on the host (see `Orders.indices`)."""
        return self.orders.of(self.place, epoch)

    def batches(self) -> Iterator[tuple[Any, Any]]:
        """Return all its batches, in order: (x, y), or (batch, None) where samples come in batches."""
        batches = self._batches() if self.dataset is None else self._own_batches(self.dataset)
        return islice(batches, self.options.local_steps)

    def _batches(self) -> Iterator[tuple[Any, Any]]:
        augment = self.orders.population.augment
        for epoch in self.epochs:
            for number, (x, y) in enumerate(self._blocks(epoch)):
                if augment is not None:
                    generator = torch.Generator(x.device)
                    generator.manual_seed(seeds.derive(self.seed, "augment", epoch, number))
                    x = apply_augment(augment, x, generator)
                sizes = self.options.sizes_of(len(y))  # `split` by one size goes through Python
                yield from zip(x.split_with_sizes(sizes), y.split_with_sizes(sizes), strict=True)

    def _blocks(self, epoch: int) -> Iterator[Tensors]:
        """Yield an epoch's samples in their order, `BLOCK` batches at a time, or fewer."""
        size, store = BLOCK * self.options.batch_size, self.clients.store
        if not self.options.shuffle:
            yield from zip(*(t[: sum(self.sizes)].split(size) for t in self.tensors), strict=True)
            return
        x, y = self.tensors if store is None else store.tensors
        order = to_device(self.order(epoch), y.device)
        if self.orders.population.augment is None:
            size = self.options.batch_size * batches_at_once(self.options.batch_size, (x, y))
        for block in order.split(size) if len(order) > size else (order,):
            yield x.index_select(0, block), y.index_select(0, block)

    def _own_batches(self, samples: ClientDataset) -> Iterator[tuple[Any, Any]]:
        first = first_index(self.clients, self.client)
        for epoch in self.epochs:
            for number, places in enumerate((self.order(epoch) - first).split_with_sizes(self.sizes)):
                yield samples.take(places, seeds.derive(self.seed, "reading", epoch, number)), None

    def full_batches(self, size: int) -> Iterator[tuple[Any, Any, int]]:
        """Yield all samples once in batches of `size`, in stored order, each with its number of samples."""
        if self.dataset is not None:
            yield from ((batch, None, n) for batch, n in self.dataset.batches(size))
            return
        yield from ((*batch, len(batch[0])) for batch in zip(*(t.split(size) for t in self.tensors), strict=True))


def plan(
    population: Population, options: SampleOptions, round: int, clients: Sequence[int], at_once: int
) -> Iterator[Work]:
    """Yield the work of each of some clients in a round.

    The orders of `at_once` clients are drawn together, before the first of these clients is yielded. A client with an
    unknown number of samples has its orders drawn at their first use, after `open`.
    """
    knows_sizes = population.clients.has_all_sizes
    at_once = at_once if knows_sizes else 1
    for begin in range(0, len(clients), at_once):
        orders = Orders(population, options, round, clients[begin : begin + at_once])
        if knows_sizes:
            orders.measure()
            if options.shuffle:
                orders.draw()
        yield from orders.works()


def batches_at_once(samples: int, tensors: Tensors) -> int:
    """Return how many batches of so many samples are gathered at once: `BLOCK`, or as many as `MAX_GATHERED` bytes hold
    where that leaves the beginning of each batch as far from a multiple of the alignment as in a block."""
    sizes = [samples * (t.numel() // t.shape[0]) * t.itemsize for t in tensors]
    if sum(sizes) * BLOCK <= MAX_GATHERED:
        return BLOCK
    is_aligned = all(size % _ALIGNMENT == 0 for t, size in zip(tensors, sizes, strict=True) if t.is_floating_point())
    return max(1, MAX_GATHERED // sum(sizes)) if is_aligned else BLOCK


def places_of(works: Sequence[Work], offsets: Sequence[int]) -> tuple[Tensor, list[int]]:
    """Return indices of samples, int64 `[.]` on the host (see `Orders.indices`), and the place among them of the sample
    of each work that comes after `offset` samples of its round."""
    parts, begins, length = dict[int, tuple[int, Tensor]](), list[int](), 0
    for work, offset in zip(works, offsets, strict=True):
        orders = work.orders
        part = parts.get(id(orders))
        if part is None:
            part = parts[id(orders)] = length, orders.draw()
            length += len(part[1])
        begins.append(part[0] + orders.begins[work.place] + offset)
    indices = [one for _, one in parts.values()]
    return indices[0] if len(indices) == 1 else torch.cat(indices), begins


def first_index(clients: Clients, client: int) -> int:
    """Return the index of a client's first sample in the store, or in its own data."""
    return 0 if clients.store is None else clients.store.offsets[client]
