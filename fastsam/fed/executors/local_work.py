"""Clients in slots of stacked rows: where they are in their round, where their batches come from, what they leave
behind."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from fastsam.fed.executors.base import ClientError, Task, divided
from fastsam.fed.executors.batches import Batch, Feed
from fastsam.fed.executors.kernel_calls import Form
from fastsam.fed.step.local_update import ClientResults, Snapshot
from fastsam.fed.step.model_copy import buffer_displacement
from fastsam.fed.step.pilot import Pilot
from fastsam.fed.step.variant import StepVariant

Shared = tuple[Tensor, Tensor, float]  # a batch, and its share in a mean


@dataclass(slots=True)
class Crew:
    """Clients in neighbouring slots that begin, step and end together: those of one key (see `feed_keys`), or one
    client.

    Attributes:
        slot, end: the first slot, and the slot after the last.
        epoch: number of steps of an epoch.
        shapes: properties that crews must share to step together: for a whole batch, and for the last batch of an
            epoch.
        steps, seen: of each client, the number of local steps and of the samples in all its batches.
        feed: batches of stored samples. A client with augmented samples is alone and has batches of its `own`.
        k: number of steps taken.
        extra_backward_passes, snapshots: of each client.
        norms: running means of the norms of a pilot's gradients, float64 `[clients]`.
        error: error for which its clients are excluded.
        drawn: index and batch of the next step, if batches are the client's own.
    """

    tasks: Sequence[Task]
    slot: int
    end: int
    kind: StepVariant
    epoch: int
    shapes: tuple[object, object]
    steps: int
    seen: int
    feed: Feed | None
    own: Iterator[Batch]
    snapshots: Sequence[dict[int, Snapshot]]
    k: int = 0
    extra_backward_passes: int = 0
    norms: Tensor | None = None
    error: ClientError | None = None
    drawn: tuple[int, Batch] | None = None

    @property
    def samples(self) -> Batch:
        """The memory of its samples, `[n, ...]`: that of all clients, or the first client's own."""
        task, store = self.tasks[0], self.tasks[0].work.store
        return (task.x, task.y) if store is None else (store.x, store.y)

    @property
    def alike_steps(self) -> tuple[int, int]:
        """Return how many of its next steps have one shape, one learning rate and one epoch, and the samples of
        each."""
        first = self.tasks[0]
        whole, rest = divided(first.samples, first.batch_size, first.work.drop_last)
        at = self.k % self.epoch
        if at >= whole:
            return 1, rest
        return 1 if self.kind.paced else min(whole - at, self.steps - self.k), first.batch_size

    @property
    def done(self) -> bool:
        """True if no step is left."""
        return self.k == self.steps or self.error is not None

    @property
    def shape(self) -> object:
        """Crews whose next step is alike in this take it together."""
        return self.shapes[(self.k + 1) % self.epoch == 0]

    def batch(self) -> Batch:
        """Return the batch of the next step, `[clients, batch, ...]`. Raises ClientError."""
        try:
            if self.feed is not None:
                return self.feed.get(self.k)
            if (
                self.drawn is None or self.drawn[0] != self.k
            ):  # a step that failed for another client's batch is repeated
                x, y = next(self.own)
                self.drawn = self.k, (x[None], y[None])
            return self.drawn[1]
        except Exception as error:
            raise client_error([self], error) from error

    def at_start(self, pilot: Pilot | None) -> Iterator[Shared]:
        """Every client's batches for its gradient at the start, `[clients, batch, ...]`: all samples, or a pilot's.
        Raises ClientError."""
        own = [task.whole() if pilot is None else task.first(pilot.batches) for task in self.tasks]
        try:
            for batches in zip(*own, strict=True):
                x, y, shares = zip(*batches, strict=True)
                yield torch.stack(x), torch.stack(y), shares[0]
        except Exception as error:
            raise client_error([self], error) from error


def crew_of(tasks: Sequence[Task], slot: int, kind: StepVariant, shapes: dict[tuple[object, ...], int]) -> Crew:
    """Tasks of one key (see `feed_keys`), from this slot on. shapes: a number for each shape of a step that was seen so
    far; new ones are added."""
    first = tasks[0]
    whole, rest = divided(first.samples, first.batch_size, first.work.drop_last)
    sizes = (first.batch_size if whole else rest, rest or first.batch_size)
    keys = [(kind, size, first.x.shape[1:], first.y.shape[1:]) for size in sizes]
    full, last = (shapes.setdefault(key, len(shapes)) for key in keys)
    epoch = whole + (rest > 0)
    return Crew(
        tasks, slot, slot + len(tasks), kind, epoch, (full, last), first.work.steps or epoch * first.epochs, first.seen,
        Feed(tasks) if first.augment is None else None, first.batches(), [{} for _ in tasks],
    )  # fmt: skip


def runs(keys: Sequence[object]) -> list[slice]:
    """Return the slices of equal neighbouring keys."""
    begins = [i for i, key in enumerate(keys) if not i or key != keys[i - 1]]
    return [slice(*results) for results in pairwise([*begins, len(keys)])]


def tasks_of(crews: Sequence[Crew]) -> list[Task]:
    """Return the tasks of all their clients."""
    return [task for crew in crews for task in crew.tasks]


def slots_of(crews: Sequence[Crew]) -> list[int]:
    """Return the slots of all their clients."""
    return [slot for crew in crews for slot in range(crew.slot, crew.end)]


def neighbours(crews: Sequence[Crew]) -> bool:
    """Return True if the crews' slots are contiguous."""
    return crews[-1].end - crews[0].slot == sum(len(crew.tasks) for crew in crews)


def next_batch(crews: Sequence[Crew]) -> Batch:
    """Return the next batch of all their clients, `[clients, batch, ...]`. Raises ClientError."""
    if len(crews) == 1:
        return crews[0].batch()
    x, y = zip(*(crew.batch() for crew in crews), strict=True)
    return torch.cat(x), torch.cat(y)


def rows_to_keep(crews: Sequence[Crew]) -> list[tuple[int, dict[int, Snapshot], int]]:
    """The rows, counted over all crews, that are to be kept as they are before the next step; where to; and the number
    of the step."""
    clients = [(crew.k, *pair) for crew in crews for pair in zip(crew.tasks, crew.snapshots, strict=True)]
    return [(row, snapshots, k) for row, (k, task, snapshots) in enumerate(clients) if k in task.snapshots]


def row_ends(crews: Sequence[Crew], form: Form, start: Tensor, buffers: Sequence[Tensor]) -> ClientResults:
    """Return the results of clients whose rows are in `form`. All have the same fields, and no buffer was changed."""
    step, clients = crews[0].tasks[0].step, [task.client for task in tasks_of(crews)]
    steps: list[int] = []
    backward_passes: list[int] = []
    samples: list[int] = []
    for crew in crews:
        n = len(crew.tasks)
        steps += [crew.k] * n
        backward_passes += [crew.k * step.backward_passes + crew.extra_backward_passes] * n
        samples += [crew.seen] * n
    moved = buffer_displacement(buffers, buffers) if buffers else None
    return ClientResults(
        client_ids=clients,
        delta=form.z - (form.field("begin") if form.kind.constant or step.start is not None else start),
        num_steps=steps,
        backward_passes=backward_passes,
        losses=form.losses.clone(),
        num_samples=samples,
        buffers=None if moved is None else moved.expand(len(clients), -1),
        dual=None if step.dual is None else form.field("dual").clone(),
        eps=None if step.dual is None else form.field("eps").clone(),
        gradient=form.field("gradient").clone() if step.full_gradient or step.pilot is not None else None,
        norms=None if step.pilot is None else torch.cat([crew.norms for crew in crews if crew.norms is not None]),
        snapshots=[snapshots for crew in crews for snapshots in crew.snapshots],
    )


def client_error(crews: Sequence[Crew], error: Exception) -> ClientError:
    """The error of a step that several clients took together."""
    tasks = tasks_of(crews)
    return ClientError.of([task.client for task in tasks], tasks[0].round, crews[0].k, error)
