"""A client in a slot of stacked rows: where it is in its round, where its batches come from, what it leaves behind."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from ..localstep import RowEnds, Snapshot
from ..replica import buffer_displacement
from .base import ClientError, Task
from .feed import Batch, Feed
from .form import Kind, Rows


@dataclass(slots=True)
class Client:
    """A task in a slot. Its batches come from a feed that it shares with its neighbours (`row` in it), or are its own.

    epoch: steps of an epoch. shapes: what rows must have in common to take a step together: for a whole batch, and for the last one of
    an epoch. seen: samples of all its batches.
    """

    task: Task
    slot: int
    kind: Kind
    epoch: int
    shapes: tuple[object, object]
    feed: Feed | None
    row: int
    own: Iterator[Batch] | None
    steps: int
    seen: int
    k: int = 0
    extra_backprops: int = 0
    snapshots: dict[int, Snapshot] = field(default_factory=dict)

    @property
    def shape(self) -> object:
        """Rows whose next step is alike in this take it together."""
        return self.shapes[(self.k + 1) % self.epoch == 0]

    def batch(self) -> Batch:
        """Of the next step; called once a step."""
        if self.feed is None:
            assert self.own is not None
            return next(self.own)
        x, y = self.feed.get(self.k)
        return x[self.row], y[self.row]


def begun(group: Sequence[tuple[int, Task]], kind: Kind, shapes: dict[tuple[object, ...], int]) -> list[Client]:
    """Tasks that are alike, with their slots: several of them share a feed, where nothing augments.

    shapes: a number for each shape of a step that was seen so far; new ones are added.
    """
    first = group[0][1]
    whole, rest = divmod(first.samples, first.batch_size)
    sizes = (first.batch_size if whole else rest, rest or first.batch_size)
    keys = [(kind, size, first.x.shape[1:], first.y.shape[1:]) for size in sizes]
    full, last = (shapes.setdefault(key, len(shapes)) for key in keys)
    epoch = whole + (rest > 0)
    steps, seen = epoch * first.epochs, first.samples * first.epochs
    feed = Feed([task for _, task in group]) if len(group) > 1 and first.augment is None else None
    return [
        Client(
            task, slot, kind, epoch, (full, last), feed, row, task.batches() if feed is None else None,
            steps, seen,
        )
        for row, (slot, task) in enumerate(group)
    ]  # fmt: skip


def one_feed(clients: Sequence[Client]) -> bool:
    """Whether they are exactly the clients of one feed: these begin, step and end together, so the first one and their number tell."""
    feed = clients[0].feed
    return feed is not None and len(clients) == len(feed.tasks)


def ended(
    clients: Sequence[Client], rows: Rows, at: slice | Tensor, losses: Tensor, start: Tensor, buffers: Sequence[Tensor]
) -> RowEnds:
    """What clients leave behind in `rows` and `losses` at the places `at`. All of them leave the same things. No buffer was changed."""
    step = clients[0].task.step

    def kept(name: str, wanted: bool = True) -> Tensor | None:
        return rows.field(name)[at] if wanted else None

    moved = buffer_displacement(buffers, buffers) if buffers else None
    return RowEnds(
        clients=[c.task.client for c in clients],
        rows=rows.field("z")[at],
        begins=start if step.e is None else kept("begin"),
        steps=[c.k for c in clients],
        backprops=[c.k * c.task.step.backprops + c.extra_backprops for c in clients],
        losses=losses[at],
        seen=[c.seen for c in clients],
        buffers=None if moved is None else moved.expand(len(clients), -1),
        dual=kept("mu", step.mu is not None),
        eps=kept("eps", step.mu is not None),
        gradient=kept("gradient", step.full_gradient),
        snapshots=[c.snapshots for c in clients],
    )


def failed(clients: Sequence[Client], error: Exception) -> ClientError:
    """The error of a step that several clients took together."""
    who = ", ".join(str(c.task.client) for c in clients[:8]) + (", ..." if len(clients) > 8 else "")
    first = clients[0]
    return ClientError(
        f"client {who} failed in round {first.task.round}, local step {first.k}: {type(error).__name__}: {error}"
    )
