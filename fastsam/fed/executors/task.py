"""The work of a client in one round: a task with the client's data, batches, orders and seeds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastsam.fed.clients.all_clients import Clients
from fastsam.fed.clients.mapped_rows import one_ahead
from fastsam.fed.clients.packed_samples import PackedSamples
from fastsam.fed.clients.pairs import Pair
from fastsam.fed.clients.population import Augment, augmented
from fastsam.fed.clients.samples import ClientDataset
from fastsam.fed.common import seeds
from fastsam.fed.step.local_update import LocalUpdate

BLOCK = 32  # batches gathered by one index_select: bounded memory, and one launch where there were 32


@dataclass(frozen=True)
class Work:
    """The common facts of all tasks of a round.

    Attributes:
        round: index of the round.
        lr: learning rate of the round.
        epochs, batch_size: epochs and batch size of the local work. The last batch of an epoch has the rest, at its
            exact shape.
        shuffle: use a new order in every epoch; otherwise the stored one.
        seed: seed of the run.
        clients: data (x, y) of all clients, on the device of the executor; `sizes` their numbers of samples.
        augment: makes training inputs of the same shape from stored ones.
        store: memory with the samples of all clients, or None.
        steps: number of local steps of every client, in place of epochs.
        drop_last: an epoch ends with its last whole batch, unless it has only a partial batch.
        samples: the clients if they are not pairs of tensors; `clients` is then empty.
    """

    round: int
    lr: float
    epochs: int
    batch_size: int
    shuffle: bool
    seed: int
    clients: Sequence[Pair]
    sizes: Sequence[int]
    augment: Augment | None = None
    store: PackedSamples | None = None
    steps: int | None = None
    drop_last: bool = False
    samples: Clients | None = None

    def seed_of(self, client: int) -> int:
        """Return the seed of all random numbers of a client's work."""
        return seeds.derive(self.seed, "client", self.round, client)

    def orders(self, clients: Sequence[int], epoch: int) -> Tensor:
        """Return the orders of the samples of some clients in an epoch, int64 `[clients, longest]` on the CPU. The
        first elements of a row are valid, one for each sample of the client."""
        return seeds.permutations(clients, [self.sizes[i] for i in clients], self.seed, "shuffle", self.round, epoch)

    def draw_orders(self, clients: Sequence[int]) -> dict[int, list[Tensor]]:
        """The orders of the samples of some clients, one an epoch; none where the clients may have other numbers of
        epochs."""
        if self.steps is not None:
            return {}
        epochs = [self.orders(clients, epoch).unbind() for epoch in range(self.epochs)]
        return {i: [order[: self.sizes[i]] for order in own] for i, *own in zip(clients, *epochs, strict=True)}


class ClientLoop(NamedTuple):
    """The loop of an algorithm for one client.

    Args:
        run: function of a `Client` that does the local work and returns what `finish_client` gets as `extra`.
        tensors: the tensors of the server's and the client's state, which it reads.
    """

    run: Callable[[Any], Mapping[str, Tensor] | None]
    tensors: Sequence[Tensor]


@dataclass(slots=True)
class Task:
    """The work of one client in one round.

    Attributes:
        client: id of the client.
        work: common facts of the round.
        step: constants of the local update.
        row: index of the client's row in vectors `[n, row_size]`.
        snapshots: local steps before which the row is copied.
        orders: orders of its samples, one per epoch, if they have been drawn (see `draw_orders`).
        own: its samples if they come in batches, from `open` on.
        begun: number of epochs that the client has already begun in this round.
        loop: the algorithm's own loop, or None for the run's epochs of local steps.
    """

    client: int
    work: Work
    step: LocalUpdate
    row: int = 0
    snapshots: frozenset[int] = frozenset()
    orders: Sequence[Tensor] | None = None
    own: ClientDataset | None = None
    begun: int = 0
    loop: ClientLoop | None = None

    def following(self, begun: int, epochs: int | None = None) -> Task:
        """Return the task of further epochs, after `begun` ones. `epochs` is their number, None for the run's work."""
        work = self.work if epochs is None else replace(self.work, epochs=epochs, steps=None)
        orders = self.orders if epochs is None and not begun else None
        return replace(self, work=work, orders=orders, begun=begun)

    def open(self) -> None:
        """Has its samples at hand, where they come in batches: of some clients they are loaded here."""
        if self.work.samples is not None:
            self.own = self.work.samples[self.client]

    @property
    def x(self) -> Tensor:
        """The inputs of the client. With a store they are in it from `store.begins[client]` on."""
        return self.work.clients[self.client][0]

    @property
    def y(self) -> Tensor:
        return self.work.clients[self.client][1]

    def vector(self, name: str) -> Tensor | None:
        """Its own vector of the step, `[row_size]`."""
        v: Tensor | None = getattr(self.step, name)
        return v if v is None or v.dim() == 1 else v[self.row]

    def buffers(self, common: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return the model's buffers at the start: the client's own, or `common` ones."""
        own = self.step.buffers
        return common if own is None else [b[self.row] for b in own]

    @property
    def seed(self) -> int:
        """The seed of all random numbers of this work."""
        return self.work.seed_of(self.client)

    @property
    def round(self) -> int:
        return self.work.round

    @property
    def lr(self) -> float:
        return self.work.lr

    def pace(self, k: int, steps: int) -> tuple[float, float]:
        """The learning rate and the radius of local step k of `steps`."""
        return self.lr * self.step.pace(k, steps), self.step.radius(k, steps)

    @property
    def epochs(self) -> int:
        """The number of epochs that it begins."""
        steps = self.work.steps
        return self.work.epochs if steps is None else -(-steps // len(self.epoch_sizes()))

    @property
    def batch_size(self) -> int:
        return self.work.batch_size

    @property
    def shuffle(self) -> bool:
        return self.work.shuffle

    @property
    def augment(self) -> Augment | None:
        return self.work.augment

    @property
    def samples(self) -> int:
        """The number of samples of the client."""
        return self.work.sizes[self.client]

    def batch_sizes(self) -> list[int]:
        """Samples of each of its batches, in order."""
        return (self.epoch_sizes() * self.epochs)[: self.work.steps]

    def epoch_sizes(self) -> list[int]:
        """Samples of each batch of an epoch."""
        return self._sizes(self.samples)

    def _sizes(self, samples: int) -> list[int]:
        whole, rest = split_epoch(samples, self.work.batch_size, self.work.drop_last)
        return [self.work.batch_size] * whole + [rest] * (rest > 0)

    @property
    def seen(self) -> int:
        """Samples of all its batches."""
        plain = self.work.steps is None and not self.work.drop_last
        return self.samples * self.epochs if plain else sum(self.batch_sizes())

    def batches(self) -> Iterator[tuple[Any, Any]]:
        """All its batches, in order: (x, y), or (batch, None) where samples come in batches."""
        every = self._batches()
        return every if self.work.steps is None else islice(every, self.work.steps)

    def _batches(self) -> Iterator[tuple[Any, Any]]:
        """Yield the batches of all epochs."""
        if self.own is not None:
            yield from self._own_batches(self.own)
            return
        for epoch in range(self.begun, self.begun + self.epochs):
            for number, (x, y) in enumerate(self._blocks(epoch)):
                if self.work.augment is not None:
                    generator = torch.Generator(x.device)
                    generator.manual_seed(seeds.derive(self.seed, "augment", epoch, number))
                    x = augmented(self.work.augment, x, generator)
                sizes = self._sizes(len(y))  # `split` by one size goes through Python
                yield from zip(x.split_with_sizes(sizes), y.split_with_sizes(sizes), strict=True)

    def _own_batches(self, own: ClientDataset) -> Iterator[tuple[Any, None]]:
        readings = self._readings(own)
        return ((batch, None) for batch in (one_ahead(readings) if own.ahead else (read() for read in readings)))

    def _readings(self, own: ClientDataset) -> Iterator[Callable[[], Any]]:
        """Yield functions that read the batches, one after the other."""
        for epoch in range(self.begun, self.begun + self.epochs):
            order = self._order(epoch) if self.shuffle else torch.arange(sum(self.epoch_sizes()))
            for number, places in enumerate(order.split_with_sizes(self.epoch_sizes())):
                yield partial(own.take, places, seeds.derive(self.seed, "reading", epoch, number))

    def _order(self, epoch: int) -> Tensor:
        return (self.orders[epoch] if self.orders else self.work.orders([self.client], epoch)[0])[
            : sum(self.epoch_sizes())
        ]

    def whole(self) -> Iterator[tuple[Any, Any, float]]:
        """Yield all samples once in batches, in stored order, with the share of each batch."""
        if self.own is not None:
            yield from ((batch, None, n / self.samples) for batch, n in self.own.batches(self.batch_size))
            return
        for x, y in zip(self.x.split(self.batch_size), self.y.split(self.batch_size), strict=True):
            yield x, y, len(y) / self.samples

    def first(self, batches: int) -> Iterator[tuple[Any, Any, float]]:
        """Yield at most `batches` first batches, with the share of each in their mean."""
        share = 1 / min(batches, len(self.batch_sizes()))
        for x, y in islice(self.batches(), batches):
            yield x, y, share

    def _blocks(self, epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
        """An epoch's samples in their order, `BLOCK` batches at a time."""
        size, kept = BLOCK * self.work.batch_size, sum(self.epoch_sizes()) if self.work.drop_last else None
        if not self.work.shuffle:
            x, y = (self.x, self.y) if kept is None else (self.x[:kept], self.y[:kept])
            yield from zip(x.split(size), y.split(size), strict=True)
            return
        drawn = self.orders[epoch] if self.orders else self.work.orders([self.client], epoch)[0]
        if kept is not None:
            drawn = drawn[:kept]
        order = to_device(drawn, self.y.device)
        for block in order.split(size) if len(order) > size else (order,):
            yield self.x.index_select(0, block), self.y.index_select(0, block)

    def pass_seed(self, step: int) -> int:
        """Return the seed of the model's random numbers (dropout) in both passes of a step."""
        return seeds.derive(self.seed, "pass", step)


def split_epoch(samples: int, batch_size: int, drop_last: bool) -> tuple[int, int]:
    """Return the number of whole batches of an epoch, and the number of samples after them (0 for none). A client with
    less samples than a batch has one batch in any case."""
    whole, rest = divmod(samples, batch_size)
    return whole, 0 if drop_last and whole else rest


def to_device(t: Tensor, device: torch.device) -> Tensor:
    """A CPU tensor on `device`. From memory that is not pinned the copy would wait for all that the stream has to do
    before."""
    if t.device == device:  # `to` takes time even where it does nothing
        return t
    return t.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else t.to(device)
