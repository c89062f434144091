"""A client in a slot of stacked rows: where it is in its round, and where its batches come from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from ..localstep import Snapshot
from .base import ClientError, Task
from .feed import Batch, Feed
from .form import Kind


@dataclass(slots=True)
class Client:
    """A task in a slot. Its batches come from a feed that it shares with its neighbours (`row` in it), or are its own.

    epoch: steps of an epoch. shapes: what rows must have in common to take a step together: for a whole batch, and for the last one of
    an epoch.
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


def failed(clients: Sequence[Client], error: Exception) -> ClientError:
    """The error of a step that several clients took together."""
    who = ", ".join(str(c.task.client) for c in clients[:8]) + (", ..." if len(clients) > 8 else "")
    first = clients[0]
    return ClientError(
        f"client {who} failed in round {first.task.round}, local step {first.k}: {type(error).__name__}: {error}"
    )
