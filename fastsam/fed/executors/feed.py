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

    The same samples in the same order as `Task.batches`, one block of batches after the other for all rows at once. In memory a row's
    batches follow each other (`by_row`: for who takes several of them at once), or the rows of a batch lie side by side.
    """

    def __init__(self, tasks: Sequence[Task], by_row: bool = True) -> None:
        self.tasks, self.size = tasks, tasks[0].batch_size
        self.by_row = by_row or tasks[0].work.store is None
        self._blocks = self._gathered()
        self._ahead: list[Batch] = []
        self._fresh: Batch | None = None  # the block of which nothing but the first batch was asked for, by row
        self._at = -1

    def get(self, k: int) -> Batch:
        """Batch k of all rows. Asked for in order; several times for one k is fine."""
        while self._at < k:
            if len(self._ahead) > 1:
                self._ahead.pop(0)
                self._fresh = None
            else:
                self._ahead = next(self._blocks)
            self._at += 1
        return self._ahead[0]

    def span(self, k: int, count: int) -> Batch:
        """Batches k to k + count - 1 of all rows, one after the other: `[rows, samples, ...]`, contiguous. Asked for in order."""
        first = self.get(k)
        if self._fresh is not None and len(self._ahead) == count:
            block, self._fresh = self._fresh, None
            self._at, self._ahead = k + count - 1, self._ahead[-1:]
            return block
        x, y = zip(first, *(self.get(i) for i in range(k + 1, k + count)), strict=True)
        return torch.cat(x, 1), torch.cat(y, 1)

    def _gathered(self) -> Iterator[list[Batch]]:
        """The batches of one block after the other."""
        first, n = self.tasks[0], self.tasks[0].samples
        for epoch in range(first.epochs):
            if first.shuffle:
                orders = seeds.permutations(n, [t.seed for t in self.tasks], "shuffle", epoch)
            else:
                orders = torch.arange(n).expand(len(self.tasks), n)
            for block in orders.split(BLOCK * self.size, 1):
                if self.by_row:
                    self._fresh = x, y = self._taken(block)
                    yield list(zip(x.split(self.size, 1), y.split(self.size, 1), strict=True))
                else:
                    yield self._side_by_side(block)

    def _side_by_side(self, orders: Tensor) -> list[Batch]:
        """The batches of a block, each contiguous."""
        whole, batches = orders.shape[1] - orders.shape[1] % self.size, list[Batch]()
        if whole:
            x, y = self._taken(orders[:, :whole].unflatten(1, (-1, self.size)).transpose(0, 1))
            batches += zip(x.unbind(), y.unbind(), strict=True)
        if whole < orders.shape[1]:
            batches.append(self._taken(orders[:, whole:]))
        return batches

    def _taken(self, orders: Tensor) -> Batch:
        """The samples of each row at `orders`, `[rows, samples]`; in a store, where this is one gather, also `[batches, rows, samples]`."""
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
    """Tasks of one round that agree in this can share a `Feed`."""
    if task.work.store is not None:  # in it all samples are alike
        return (task.samples,)
    return (task.x.shape, task.y.shape, task.batch_size, task.epochs, task.shuffle, task.augment)


def filled(batch: Batch, rows: int) -> Batch:
    """The batch with the samples of its first row for rows up to `rows` that nobody needs: one shape, not many."""
    x, y = batch
    spare = rows - len(x)
    if not spare:
        return x, y
    return torch.cat([x, x[:1].expand(spare, *x.shape[1:])]), torch.cat([y, y[:1].expand(spare, *y.shape[1:])])
