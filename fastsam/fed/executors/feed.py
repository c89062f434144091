"""The batches of stacked clients: `[rows, batch, ...]`, gathered for many batches and all rows at once where the rows allow it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from .. import seeds
from .base import BLOCK, Task, sent

Batch = tuple[Tensor, Tensor]


class Feed:
    """The batches of clients that begin together and are alike: as many samples, one batch size, no augmentation.

    The same samples in the same order as `Task.batches`, one block of batches after the other for all rows at once.
    """

    def __init__(self, tasks: Sequence[Task]) -> None:
        self.tasks, self.size = tasks, tasks[0].batch_size
        self._blocks = self._gathered()
        self._ahead: list[Batch] = []
        self._at = -1

    def get(self, k: int) -> Batch:
        """Batch k of all rows. Asked for in order; several times for one k is fine."""
        while self._at < k:
            if len(self._ahead) > 1:
                self._ahead.pop(0)
            else:
                x, y = next(self._blocks)
                self._ahead = list(zip(x.split(self.size, 1), y.split(self.size, 1), strict=True))
            self._at += 1
        return self._ahead[0]

    def _gathered(self) -> Iterator[Batch]:
        """Blocks `[rows, samples, ...]`."""
        first, n = self.tasks[0], self.tasks[0].samples
        for epoch in range(first.epochs):
            if first.shuffle:
                orders = seeds.permutations(n, [t.seed for t in self.tasks], "shuffle", epoch)
            else:
                orders = torch.arange(n).expand(len(self.tasks), n)
            for block in orders.split(BLOCK * self.size, 1):
                yield self._taken(block)

    def _taken(self, orders: Tensor) -> Batch:
        """The samples of each row at `orders` (`[rows, samples]`): one gather, where they all lie in one store."""
        tasks, store, device = self.tasks, self.tasks[0].work.store, self.tasks[0].y.device
        if store is not None:
            wanted = sent((orders + torch.tensor([t.begin for t in tasks])[:, None]).flatten(), device)
            x, y = (part.index_select(0, wanted).unflatten(0, orders.shape) for part in (store.x, store.y))
            return x, y
        wanted = sent(orders.contiguous(), device)
        x, y = (part.new_empty(*orders.shape, *part.shape[1:]) for part in (tasks[0].x, tasks[0].y))
        for row, task in enumerate(tasks):
            torch.index_select(task.x, 0, wanted[row], out=x[row])
            torch.index_select(task.y, 0, wanted[row], out=y[row])
        return x, y


def alike(task: Task) -> tuple[object, ...]:
    """Tasks that agree in this can share a `Feed`."""
    return (task.x.shape, task.y.shape, task.batch_size, task.epochs, task.shuffle, task.augment)


def joined(batches: Sequence[Batch], rows: int) -> Batch:
    """Batches one after the other, with the samples of the first row for rows up to `rows` that nobody needs: one shape, not many."""
    x, y = (torch.cat(part, 1) if len(part) > 1 else part[0] for part in zip(*batches, strict=True))
    spare = rows - len(x)
    if not spare:
        return x, y
    return torch.cat([x, x[:1].expand(spare, *x.shape[1:])]), torch.cat([y, y[:1].expand(spare, *y.shape[1:])])
