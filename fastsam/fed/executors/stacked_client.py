"""Clients in slots of stacked rows: where they are in their round, and the samples of their next batches."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from fastsam.fed.clients.plan import places_of
from fastsam.fed.clients.samples import Tensors, tensors_of
from fastsam.fed.common.transfer import to_device
from fastsam.fed.executors.base import ClientError
from fastsam.fed.executors.task import Task, WeightedBatch
from fastsam.fed.update.model_copy import buffer_displacement
from fastsam.fed.update.results import ClientResults, Snapshot
from fastsam.fed.update.rows import Rows
from fastsam.fed.update.steps import Key
from fastsam.fed.update.watched import KeptRow


class RowEnd(NamedTuple):
    """The delta and its squared norm of a row: tensors of all rows of a native call, and the row's place in them."""

    deltas: Tensor
    squares: Tensor
    place: int


@dataclass(slots=True, eq=False)
class StackedClient:
    """A client in a slot of stacked rows.

    Attributes:
        task: its task; key: the key of its step.
        slot: index of its row.
        epoch: number of samples of each batch of an epoch.
        steps: number of its local steps.
        shapes: shapes of its samples, or () if the samples of all clients are in a store, which are alike.
        batches: its own batches if samples are augmented.
        k: number of steps taken.
        backward_passes: number of backward passes.
        snapshots: copies of its row.
        error: error for which it is excluded.
        end: its results, if its last steps were native.
    """

    task: Task
    key: Key
    slot: int
    epoch: Sequence[int]
    steps: int
    shapes: tuple[torch.Size, ...] = ()
    batches: Iterator[Tensors] | None = None
    k: int = 0
    backward_passes: int = 0
    snapshots: dict[int, Snapshot] = field(default_factory=dict)
    error: ClientError | None = None
    end: RowEnd | None = None

    @classmethod
    def of(cls, task: Task, slot: int) -> StackedClient:
        """Return a task's client at the beginning of its round."""
        work, population = task.work, task.setup.population
        epoch = work.sizes
        steps = work.options.local_steps or work.options.local_epochs * len(epoch)
        client = cls(task, task.step.key, slot, epoch, steps)
        if population.clients.store is None:
            client.shapes = tuple(t.shape[1:] for t in work.tensors)
        if population.augment is not None:
            client.batches = map(tensors_of, work.batches())
        return client

    @property
    def size(self) -> int:
        """The number of samples of the next batch."""
        return self.epoch[self.k % len(self.epoch)]

    @property
    def offset(self) -> int:
        """The number of samples of the batches of all steps that were taken."""
        return self.offset_of(self.k)

    def offset_of(self, k: int) -> int:
        """Return the number of samples of the batches of the first `k` steps. All batches of an epoch but the last are
        of one size."""
        epochs, place = divmod(k, len(self.epoch))
        return place * self.epoch[0] + epochs * ((len(self.epoch) - 1) * self.epoch[0] + self.epoch[-1])

    @property
    def samples(self) -> Tensors:
        """The memory of the samples, each `[n, ...]`: of all clients if they are in a store, else of this client."""
        store = self.task.work.clients.store
        return self.task.work.tensors if store is None else store.tensors

    @property
    def rate(self) -> float:
        """The learning rate of the next step."""
        return self.task.lr_of_step(self.k, self.steps)

    @property
    def is_finished(self) -> bool:
        """True if no step is left."""
        return self.k == self.steps or self.error is not None

    def steps_of_sizes(self, sizes: Container[int]) -> int:
        """Return how many of its next steps have batches of such sizes. They are in one epoch, or begin with one and
        are all that are left."""
        first, last, place = self.epoch[0], self.epoch[-1], self.k % len(self.epoch)
        left, num_full = self.steps - self.k, len(self.epoch) - (last != first)
        if first in sizes and last in sizes:
            return left if place == 0 else min(len(self.epoch) - place, left)
        if place < num_full:
            return min(num_full - place, left) if first in sizes else 0
        return int(last in sizes)

    def equal_steps(self) -> int:
        """Return how many of its next steps have batches of the size of the next one."""
        place, first, last = self.k % len(self.epoch), self.epoch[0], self.epoch[-1]
        if first == last:
            return self.steps - self.k
        return min(max(1, len(self.epoch) - 1 - place), self.steps - self.k)

    def advance(self, steps: int, passes: int) -> None:
        """Count steps that were taken, with a number of backward passes each."""
        self.k += steps
        self.backward_passes += steps * passes

    def next_batch(self) -> Tensors:
        """Return the next batch of a client without a store, each `[batch, ...]`."""
        if self.batches is not None:
            return next(self.batches)
        indices, begin = place_of(self)
        return self._take(indices[begin : begin + self.size])

    def _take(self, places: Tensor) -> Tensors:
        return tuple(t.index_select(0, to_device(places, t.device)) for t in self.task.work.tensors)

    def error_of(self, error: Exception) -> ClientError:
        """Return the error of this client's next step."""
        return ClientError.from_error([self.task.client], self.task.round, self.k, error)


Group = Sequence[StackedClient]  # clients in the order of their slots, whose next batches have one shape


def place_of(client: StackedClient) -> tuple[Tensor, int]:
    """Return indices of samples, and where among them the client's next batch begins."""
    indices, (begin,) = places_of([client.task.work], [client.offset])
    return indices, begin


def next_indices(clients: Group, steps: int = 1) -> Tensor:
    """Return the samples of the next steps of clients, whose batches are of one size: their indices in the store, int64
    `[clients, steps * batch]` on the host."""
    indices, begins = places_of([c.task.work for c in clients], [c.offset for c in clients])
    windows = indices.unfold(0, steps * clients[0].size, 1)
    return windows.index_select(0, torch.tensor(begins, device="cpu"))


def keys_of(clients: Group, steps: int = 1) -> Tensor:
    """Return the seeds of the dropout in the next steps of clients, int64 `[clients, steps]` on the host."""
    return torch.tensor([[c.task.pass_seed(c.k + i) for i in range(steps)] for c in clients], device="cpu")


def gather_samples(samples: Tensors, indices: Tensor) -> Tensors:
    """Return the samples at indices `[rows, batch]`, each `[rows, batch, ...]`."""
    flat = indices.flatten()
    return tuple([t.index_select(0, flat).view(*indices.shape, *t.shape[1:]) for t in samples])


def runs(keys: Sequence[object]) -> list[slice]:
    """Return the slices of equal neighbouring keys."""
    begins = [i for i, key in enumerate(keys) if not i or key != keys[i - 1]]
    return [slice(*ends) for ends in pairwise([*begins, len(keys)])]


def are_neighbours(clients: Group) -> bool:
    """Return True if the slots of clients, which are sorted, are contiguous."""
    return clients[-1].slot - clients[0].slot == len(clients) - 1


def weighted_batches(
    client: StackedClient, batches_of: Callable[[Task], Iterator[WeightedBatch]]
) -> Iterator[tuple[Tensors, float]]:
    """Yield batches for a gradient before the first step, each with its share in the mean. Raises ClientError."""
    try:
        client.task.work.open()
        for *batch, share in batches_of(client.task):
            yield tensors_of(batch), share
    except Exception as error:
        raise client.error_of(error) from error


def rows_to_keep(clients: Group) -> list[KeptRow]:
    """Return the rows that are copied before the next step, counted over the clients."""
    return [(row, c.snapshots, c.k) for row, c in enumerate(clients) if c.k in c.task.snapshots]


def results_of(clients: Group, rows: Rows, buffers: Sequence[Tensor]) -> ClientResults:
    """Return the results of clients in `rows`. Their steps are of one sort, and no buffer was changed."""
    step, buffer_deltas = clients[0].task.step, buffer_displacement(buffers, buffers) if buffers else None
    delta, squares = _known_ends(clients) or (None, None)
    return ClientResults(
        client_ids=[c.task.client for c in clients],
        num_steps=[c.k for c in clients],
        backward_passes=[c.backward_passes for c in clients],
        losses=rows.losses.clone(),
        num_samples=[c.offset for c in clients],
        buffers=None if buffer_deltas is None else buffer_deltas.expand(len(clients), -1),
        snapshots=[c.snapshots for c in clients],
        start=_starts([c.task for c in clients]),
        squares=squares,
        **rows.results(step.state is not None, delta),
    )


def _known_ends(clients: Group) -> tuple[Tensor, Tensor] | None:
    """Return the deltas and squared norms of all clients, or None if they are not known."""
    ends = [c.end for c in clients if c.end is not None]
    if len(ends) < len(clients):
        return None
    deltas, squares, _ = ends[0]
    is_one_call = all(end.deltas is deltas and end.place == i for i, end in enumerate(ends))
    if is_one_call and len(ends) == len(deltas):
        return deltas, squares
    return torch.stack([e.deltas[e.place] for e in ends]), torch.stack([e.squares[e.place] for e in ends])


def _starts(tasks: Sequence[Task]) -> Tensor | None:
    """Return the weights at which clients start, `[tasks, row_size]`, or None if they start at the global model."""
    first = tasks[0].step.start
    if first is None:
        return None
    if first.dim() == 1 and all(task.step.start is first for task in tasks):
        return first.expand(len(tasks), -1)
    return torch.stack([task.start(first) for task in tasks])


def client_error(clients: Group, error: Exception) -> ClientError:
    """Return the error of a step that several clients took together."""
    first = clients[0]
    return ClientError.from_error([c.task.client for c in clients], first.task.round, first.k, error)
