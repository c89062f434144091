"""The passes of stacked clients, for their steps."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from fastsam.fed.clients.samples import Tensors
from fastsam.fed.executors.base import ClientError
from fastsam.fed.executors.extra_models import TEACHER_NEEDS
from fastsam.fed.executors.stacked_client import Group, StackedClient, weighted_batches
from fastsam.fed.executors.task import Task, WeightedBatch
from fastsam.fed.update.gradients import Gradients
from fastsam.fed.update.model_copy import Replica
from fastsam.fed.update.passes import Objective, Passes
from fastsam.fed.update.rows import Rows

WeightedPart = tuple[StackedClient, Tensors, float]  # a client's batch, and its share in a mean


class Runner(Protocol):
    """The executor that runs the passes."""

    rows: Rows
    replica: Replica

    def run(
        self, clients: Group, rows: Rows, batch: Tensors, objective: Objective | None = None, *operands: Tensor
    ) -> tuple[Tensor, Gradients]:
        """Run a pass of clients, and return the losses and gradients of their rows."""

    def outputs_of(self, clients: Group, w: Tensor, batch: Tensors) -> Tensor:
        """Return the outputs of teachers with the weights `w` `[rows, row_size]`."""

    def gather(self, clients: Group) -> Rows:
        """Return the clients' rows next to each other."""

    def with_keys(self, clients: Group, batch: Tensors) -> Tensors:
        """Return a batch of clients, with the seeds of their dropout if the model draws."""

    def leave_out(self, clients: Group, error: ClientError) -> None:
        """Exclude the clients that have this error, or raise it."""


class StackedStep(Passes):
    """The passes of one step of some clients."""

    def __init__(self, executor: Runner, clients: Group, rows: Rows, batch: Tensors) -> None:
        self._executor, self._clients, self._rows, self._batch = executor, clients, rows, batch
        self.count, self.is_plain = 0, True

    def __call__(self, objective: Objective | None = None, *operands: Tensor) -> tuple[Tensor, Gradients]:
        self.count, self.is_plain = self.count + 1, self.is_plain and objective is None
        return self._executor.run(self._clients, self._rows, self._batch, objective, *operands)

    def outputs_of(self, w: Tensor) -> Tensor:
        """See `Passes.outputs_of`."""
        if self._clients[0].task.step.start is not None and w.data_ptr() != self._rows["start"].data_ptr():
            raise ValueError(TEACHER_NEEDS)
        self.is_plain = False
        return self._executor.outputs_of(self._clients, w, self._batch)


class StackedBeginning(Passes):
    """The passes of some clients before their first step. Batches of one shape share a pass."""

    def __init__(self, executor: Runner, clients: Group) -> None:
        self._executor, self._clients = executor, clients
        self._places = {client: place for place, client in enumerate(clients)}

    def first(self, batches: int) -> tuple[Tensor, Tensor]:
        """See `Passes.first`."""
        norms = self._executor.rows.z.new_zeros(len(self._clients), 1, dtype=torch.float64)
        return self._mean_gradients(lambda task: task.first_batches(batches), norms), norms

    def all(self) -> Tensor:
        """See `Passes.all`."""
        return self._mean_gradients(Task.all_batches)

    def _mean_gradients(
        self, batches_of: Callable[[Task], Iterator[WeightedBatch]], norms: Tensor | None = None
    ) -> Tensor:
        """Return each client's mean gradient over batches, `[clients, row_size]`, and add the mean of its norms to
        `norms`, float64 `[clients, 1]`."""
        z, module = self._executor.rows.z, self._executor.replica.module
        total = z.new_zeros(len(self._clients), z.shape[1])
        queue = {client: weighted_batches(client, batches_of) for client in self._clients}
        module.eval()
        try:
            while queue:
                groups: dict[Hashable, list[WeightedPart]] = {}
                for client, batches in list(queue.items()):
                    part = self._next(client, batches)
                    if part is None:
                        del queue[client]
                    else:
                        groups.setdefault(tuple(t.shape for t in part[1]), []).append(part)
                for group in groups.values():
                    try:
                        self._add(group, total, norms)
                    except ClientError as error:
                        self._executor.leave_out([client for client, *_ in group], error)
        finally:
            module.train()
        return total

    def _next(self, client: StackedClient, batches: Iterator[tuple[Tensors, float]]) -> WeightedPart | None:
        """Return the client's next batch, or None after the last one, and for a client that is excluded."""
        try:
            batch = None if client.error is not None else next(batches, None)
        except ClientError as error:
            self._executor.leave_out([client], error)
            return None
        return None if batch is None else (client, *batch)

    def _add(self, group: Sequence[WeightedPart], total: Tensor, norms: Tensor | None) -> None:
        """Add the gradients of a batch of some clients to their rows of `total`, and the norms of their gradients."""
        clients, batches, shares = zip(*group, strict=True)
        rows = self._executor.gather(clients)
        batch = tuple(map(torch.stack, zip(*batches, strict=True)))
        _, gradients = self._executor.run(clients, rows, self._executor.with_keys(clients, batch))
        index = torch.tensor([self._places[client] for client in clients], device=total.device)
        share = torch.tensor(shares, dtype=torch.float64, device=total.device)[:, None]
        g = torch.zeros(len(clients), total.shape[1], dtype=total.dtype, device=total.device)
        gradients.add_to(g, rows.layout)
        sums = [(total, g * share.to(g.dtype))]
        if norms is not None:
            sums.append((norms, gradients.norms(len(clients))[:, None] * share))
        for sum_, part in sums:
            # a batch without a label has no gradient, and may have NaN
            sum_.index_add_(0, index, part if all(shares) else torch.where(share > 0, part, 0))
        for client in clients:
            client.backward_passes += 1
