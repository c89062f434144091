"""Clients in slots of stacked rows: their position in the round, their batches and their results."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from fastsam.fed.clients.samples import Tensors, tensors_of
from fastsam.fed.executors.base import ClientError
from fastsam.fed.executors.batch_gatherer import BatchGatherer, gather_together
from fastsam.fed.executors.task import Task, WeightedBatch
from fastsam.fed.update.model_copy import buffer_displacement
from fastsam.fed.update.results import ClientResults, Snapshot
from fastsam.fed.update.rows import Rows
from fastsam.fed.update.steps import Key, Step
from fastsam.fed.update.watched import KeptRow

Group = Sequence["ClientBlock"]  # blocks whose next batches have one shape
JointBatch = tuple[Tensors, Sequence[float]]  # a batch of several clients, and its share in their means


class RowEnds(NamedTuple):
    """The deltas and squared norms of the rows of one native call. `place` is the first row of a block."""

    deltas: Tensor
    squares: Tensor
    place: int


@dataclass(slots=True)
class ClientBlock:
    """Clients of one key (see `gather_keys`) in neighbouring slots, which begin, step and end together.

    Attributes:
        tasks: tasks of the clients.
        slot, end: the first slot, and the slot after the last.
        step: a step of their key.
        sizes: number of samples of each batch of an epoch.
        shape_numbers: numbers of the shapes of a step, for a whole batch and for the last batch of an epoch.
        steps: number of local steps of a client.
        num_samples: number of samples in all batches of a client.
        gatherer: batches of stored samples. A client with augmented samples has a separate block.
        batches: the batches of such a client.
        snapshots: copied rows of each client.
        k: number of steps taken.
        backward_passes: number of backward passes of a client.
        error: error for which its clients are excluded.
        failures: errors for which single clients are excluded, by their places among the tasks.
        ends: the deltas and squared norms of its clients, if the last steps were native.
        cached_batch: index and batch of the next step, if batches are the client's own.
    """

    tasks: Sequence[Task]
    slot: int
    end: int
    step: Step
    sizes: Sequence[int]
    shape_numbers: tuple[int, int]
    steps: int
    num_samples: int
    gatherer: BatchGatherer | None
    batches: Iterator[Tensors]
    snapshots: Sequence[dict[int, Snapshot]]
    k: int = 0
    backward_passes: int = 0
    error: ClientError | None = None
    failures: dict[int, ClientError] = field(default_factory=dict)
    ends: RowEnds | None = None
    cached_batch: tuple[int, Tensors] | None = None

    @property
    def samples(self) -> Tensors:
        """Return the memory of the samples, each `[n, ...]`, of all clients, or of the first client."""
        task, store = self.tasks[0], self.tasks[0].setup.population.clients.store
        return task.work.tensors if store is None else store.tensors

    @property
    def key(self) -> Key:
        """The key of their steps."""
        return self.step.key

    @property
    def epoch(self) -> int:
        """Number of steps of an epoch."""
        return len(self.sizes)

    @property
    def rates(self) -> list[float]:
        """The learning rates of the clients' next step."""
        return [task.lr_of_step(self.k, self.steps) for task in self.tasks]

    def steps_of_sizes(self, sizes: Container[int]) -> int:
        """Return how many of its next steps have batches of such sizes, one learning rate and one epoch, or begin with
        an epoch and are all that are left."""
        first, last, place = self.sizes[0], self.sizes[-1], self.k % self.epoch
        num_full = self.epoch - (last != first)
        if self.key.has_rate:
            return int(self.sizes[place] in sizes)
        if first in sizes and last in sizes:
            return self.steps - self.k if place == 0 else min(self.epoch - place, self.steps - self.k)
        if place < num_full:
            return min(num_full - place, self.steps - self.k) if first in sizes else 0
        return int(last in sizes)

    @property
    def is_finished(self) -> bool:
        """True if no step is left."""
        return self.k == self.steps or self.error is not None

    @property
    def shape_number(self) -> int:
        """Number of the next step's shape. Blocks with equal numbers may step together."""
        is_last_of_epoch = (self.k + 1) % self.epoch == 0
        return self.shape_numbers[is_last_of_epoch]

    def batch(self) -> Tensors:
        """Return the batch of the next step, each `[clients, batch, ...]`. Raises ClientError."""
        try:
            if self.gatherer is not None:
                return self.gatherer.get(self.k)
            # A step that failed for another client's batch is repeated.
            if self.cached_batch is None or self.cached_batch[0] != self.k:
                self.cached_batch = self.k, tuple(t[None] for t in next(self.batches))
            return self.cached_batch[1]
        except Exception as error:
            raise client_error([self], error) from error

    def at_start(self, batches_of: Callable[[Task], Iterator[WeightedBatch]]) -> Iterator[JointBatch]:
        """Yield every client's batches for a gradient before its first step, each `[clients, batch, ...]`. Raises
        ClientError."""
        try:
            for task in self.tasks:
                task.work.open()
            for batches in zip(*(batches_of(task) for task in self.tasks), strict=True):
                tensors = zip(*(tensors_of(batch) for *batch, _ in batches), strict=True)
                yield tuple(map(torch.stack, tensors)), [share for *_, share in batches]
        except Exception as error:
            raise client_error([self], error) from error


class BatchSchedule(NamedTuple):
    """The batches of a client with a certain number of samples; see `ClientBlock`."""

    sizes: Sequence[int]
    shape_numbers: tuple[int, int]
    steps: int
    num_samples: int


class Schedules:
    """The schedules of batches that have occurred in a run."""

    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], BatchSchedule] = {}
        # numbers of shapes of a step: key, samples of a batch, shapes of samples
        self._shape_numbers: dict[tuple[object, ...], int] = {}

    def of(self, task: Task) -> BatchSchedule:
        """Return the schedule of a task's batches."""
        is_stored = task.setup.population.clients.store is not None  # in a store all samples are alike
        shapes = () if is_stored else tuple(t.shape[1:] for t in task.work.tensors)
        step = task.step.key
        key = (step, task.work.samples, *shapes)
        schedule = self._known.get(key)
        if schedule is None:
            sizes, batch_sizes, numbers = task.work.sizes, task.work.batch_sizes(), self._shape_numbers
            full, last = (numbers.setdefault((step, n, *shapes), len(numbers)) for n in (sizes[0], sizes[-1]))
            schedule = self._known[key] = BatchSchedule(sizes, (full, last), len(batch_sizes), sum(batch_sizes))
        return schedule


def block_of(tasks: Sequence[Task], slot: int, schedules: Schedules) -> ClientBlock:
    """Return a block of tasks of one key (see `gather_keys`), whose steps are of one key too, from slot `slot` on."""
    first, schedule = tasks[0], schedules.of(tasks[0])
    has_gatherer = first.setup.population.augment is None
    gatherer = BatchGatherer([task.work for task in tasks]) if has_gatherer else None
    batches = iter(()) if has_gatherer else first.work.batches()
    snapshots: list[dict[int, Snapshot]] = [{} for _ in tasks]
    return ClientBlock(
        tasks, slot, slot + len(tasks), first.step, *schedule, gatherer, batches, snapshots
    )  # fmt: skip


def runs(keys: Sequence[object]) -> list[slice]:
    """Return the slices of equal neighbouring keys."""
    begins = [i for i, key in enumerate(keys) if not i or key != keys[i - 1]]
    return [slice(*results) for results in pairwise([*begins, len(keys)])]


def tasks_of(blocks: Sequence[ClientBlock]) -> list[Task]:
    """Return the tasks of all their clients."""
    return [task for block in blocks for task in block.tasks]


def slots_of(blocks: Sequence[ClientBlock]) -> list[int]:
    """Return the slots of all their clients."""
    return [slot for block in blocks for slot in range(block.slot, block.end)]


def are_neighbours(blocks: Group) -> bool:
    """Return True if the blocks' slots are contiguous."""
    return blocks[-1].end - blocks[0].slot == sum(len(block.tasks) for block in blocks)


def next_batch(blocks: Group) -> Tensors:
    """Return the next batch of all their clients, each `[clients, batch, ...]`. Raises ClientError."""
    if len(blocks) == 1:
        return blocks[0].batch()
    gatherers = [block.gatherer for block in blocks if block.gatherer is not None]
    if len(gatherers) == len(blocks) and are_neighbours(blocks):
        batch = gather_together(gatherers, [block.k for block in blocks])
        if batch is not None:
            return batch
    return tuple(map(torch.cat, zip(*(block.batch() for block in blocks), strict=True)))


def rows_to_keep(blocks: Sequence[ClientBlock]) -> list[KeptRow]:
    """Return the rows that are copied before the next step, counted over all blocks, each with the dict for its
    snapshot and the number of the step."""
    clients = [(block.k, *pair) for block in blocks for pair in zip(block.tasks, block.snapshots, strict=True)]
    return [(row, snapshots, k) for row, (k, task, snapshots) in enumerate(clients) if k in task.snapshots]


def results_of(blocks: Sequence[ClientBlock], rows: Rows, buffers: Sequence[Tensor]) -> ClientResults:
    """Return the results of clients in `rows`. Their steps are of one sort, and no buffer was changed."""
    step, clients = blocks[0].step, [task.client for task in tasks_of(blocks)]
    block_of_client = [block for block in blocks for _ in block.tasks]
    buffer_deltas = buffer_displacement(buffers, buffers) if buffers else None
    delta, squares = _joined_ends(blocks) or (None, None)
    return ClientResults(
        client_ids=clients,
        num_steps=[block.k for block in block_of_client],
        backward_passes=[block.backward_passes for block in block_of_client],
        losses=rows.losses.clone(),
        num_samples=[block.num_samples for block in block_of_client],
        buffers=None if buffer_deltas is None else buffer_deltas.expand(len(clients), -1),
        snapshots=[snapshots for block in blocks for snapshots in block.snapshots],
        start=_starts(tasks_of(blocks)),
        squares=squares,
        **rows.results(step.state is not None, delta),
    )


def _joined_ends(blocks: Sequence[ClientBlock]) -> tuple[Tensor, Tensor] | None:
    """Return the deltas and squared norms of all clients of the blocks, in new memory, or None if they are not
    known."""
    ends = [(block.ends, len(block.tasks)) for block in blocks if block.ends is not None]
    if len(ends) < len(blocks):
        return None
    deltas, squares, _ = ends[0][0]
    if all(end.deltas is deltas for end, _ in ends) and sum(n for _, n in ends) == len(deltas):
        return deltas, squares  # blocks of one call, which end together, in its order
    parts = [(end.deltas[end.place : end.place + n], end.squares[end.place : end.place + n]) for end, n in ends]
    deltas, squares = map(torch.cat, zip(*parts, strict=True))
    return deltas, squares


def places_of_results(blocks: Sequence[ClientBlock]) -> list[int]:
    """Return the places of the clients that did not fail, among all clients of the blocks."""
    clients = [place not in block.failures for block in blocks for place in range(len(block.tasks))]
    return [place for place, is_good in enumerate(clients) if is_good]


def _starts(tasks: Sequence[Task]) -> Tensor | None:
    """Return the weights at which clients start, `[tasks, row_size]`, or None if they start at the global model."""
    first = tasks[0].step.start
    if first is None:
        return None
    if first.dim() == 1 and all(task.step.start is first for task in tasks):
        return first.expand(len(tasks), -1)
    return torch.stack([task.start(first) for task in tasks])


def client_error(blocks: Sequence[ClientBlock], error: Exception) -> ClientError:
    """Return the error of a step that several clients took together."""
    tasks = tasks_of(blocks)
    return ClientError.from_error([task.client for task in tasks], tasks[0].round, blocks[0].k, error)
