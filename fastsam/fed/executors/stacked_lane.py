"""n rows, the model that is mapped over them, and the passes of the clients in the rows."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from fastsam.fed.clients.samples import Tensors
from fastsam.fed.common.transfer import to_device
from fastsam.fed.executors import stacked
from fastsam.fed.executors.base import ClientError, excludes
from fastsam.fed.executors.extra_models import TEACHER_NEEDS
from fastsam.fed.executors.slow_calls import SlowCalls
from fastsam.fed.executors.stacked_client import (
    Group,
    StackedClient,
    are_neighbours,
    client_error,
    keys_of,
    rows_to_keep,
    weighted_batches,
)
from fastsam.fed.executors.task import Setup, Task, WeightedBatch
from fastsam.fed.update.gradients import Gradients
from fastsam.fed.update.model_copy import Replica
from fastsam.fed.update.passes import Objective, Passes
from fastsam.fed.update.rows import Rows
from fastsam.fed.update.scratch_rows import ScratchRows
from fastsam.fed.update.watched import take_step

WeightedPart = tuple[StackedClient, Tensors, float]  # a client's batch, and its share in a mean
Result = TypeVar("Result")


class StackedLane:
    """The rows of stacked clients, and their steps and passes.

    Attributes:
        rows: the rows, one for each slot.
        replica: the model.
        passes: passes of the model over rows.
    """

    def __init__(self, setup: Setup, rows: Rows, slots: int) -> None:
        self.setup, self.rows, self._slots = setup, rows, slots
        self.replica = Replica(setup.model, setup.layout, rows.z[0])
        self.passes = stacked.StackedPasses(self.replica, setup.layout, setup, SlowCalls(is_logged=True))
        self.replica.module.train()
        self._scratch: ScratchRows | None = None

    # --- rows ---

    @property
    def scratch(self) -> ScratchRows:
        """Rows for copies, made when they are first needed."""
        if self._scratch is None:
            self._scratch = ScratchRows(self.rows, self.setup, self._slots)
        return self._scratch

    def gather(self, clients: Group) -> Rows:
        """Return the clients' rows next to each other, ready for a step: the rows themselves, or copies, which
        `put_back` copies back."""
        if not are_neighbours(clients):
            scratch = self.scratch
            return scratch.gather(scratch.index_of([c.slot for c in clients]), clients[0].key)
        rows = self.rows.part(clients[0].slot, clients[-1].slot + 1)
        rows.select(clients[0].key)
        return rows

    def put_back(self, clients: Group, rows: Rows) -> None:
        """Copy the results of a step from copied rows to the rows."""
        if rows.memory is not self.rows.memory:
            self.scratch.put_back(self.scratch.index_of([c.slot for c in clients]), rows)

    # --- steps and passes ---

    def take_step(self, clients: Group, rows: Rows, batch: Tensors) -> StackedStep:
        """Take a step of the clients' rows on the device on a batch, each `[rows, batch, ...]`. Add up the losses, and
        return the passes."""
        passes, step = StackedStep(self, clients, rows, batch), clients[0].task.step
        kept = rows_to_keep(clients)
        losses = take_step(step, rows, passes, kept) if kept else step(rows, passes)
        rows.losses.add_(losses.double() * batch[0].shape[1])
        return passes

    def with_keys(self, clients: Group, batch: Tensors) -> Tensors:
        """Return a batch of clients, with the seeds of the dropout in their next steps if the model draws."""
        if not self.passes.draws or not clients:
            return batch
        keys = to_device(keys_of(clients), self.setup.device)
        return (*batch, keys.expand(-1, batch[0].shape[1]))

    def run(
        self, clients: Group, rows: Rows, batch: Tensors, objective: Objective | None = None, *operands: Tensor
    ) -> tuple[Tensor, Gradients]:
        """Run a pass of clients, and return the losses and gradients of their rows."""

        def run(place: slice) -> tuple[Tensor, Gradients]:
            if place == slice(0, rows.n):
                return self.passes.run(rows, *batch, objective=objective, operands=operands)
            tensors, others = [t[place] for t in batch], [t[place] for t in operands]
            some = rows.part(place.start, place.stop)
            return self.passes.run(some, *tensors, objective=objective, operands=others)

        results = self._by_client(clients, len(batch[0]), run)
        if len(results) == 1:
            return results[0]
        losses, gradients = zip(*results, strict=True)
        return torch.cat(losses), Gradients.join(gradients, self.setup.layout)

    def outputs_of(self, clients: Group, w: Tensor, batch: Tensors) -> Tensor:
        """Return the outputs of teachers with the weights `w` `[rows, row_size]`."""
        outputs = self._by_client(
            clients, len(w), lambda place: self.passes.outputs_of(w[place], tuple(t[place] for t in batch))
        )
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _by_client(self, clients: Group, rows: int, run: Callable[[slice], Result]) -> list[Result]:
        """Return the result of all rows. If it raises, return the results of each client by itself, and exclude the
        clients for which it raises again. The place of such a client has the result of another one, which is not read.

        Raises:
            ClientError: clients are not excluded, or all raise, or only all together do.
        """
        try:
            return [run(slice(0, rows))]
        except Exception as error:
            self.check_model(clients, error)
            cause = error
        results = dict[int, Result]()
        for i, client in enumerate(clients if len(clients) > 1 else ()):
            try:
                results[i] = run(slice(i, i + 1))
            except Exception as error:
                self.check_model(clients, error)
                self.leave_out([client], client.error or client.error_of(error))
        if len(results) in (0, len(clients)):
            raise client_error(clients, cause) from cause
        other = next(iter(results.values()))
        return [results.get(i, other) for i in range(rows)]

    def check_model(self, clients: Group, cause: Exception | None = None) -> None:
        """Raise ClientError if a pass has changed the model."""
        problem = self.replica.guard.find_problem(has_fixed_buffers=True)
        if problem:
            first = clients[0]
            ids = [client.task.client for client in clients]
            raise ClientError.from_model(ids, first.task.round, first.k, problem) from cause

    def leave_out(self, clients: Group, error: ClientError) -> None:
        """Exclude the clients that have this error. Raises the error if clients are not excluded."""
        if not excludes(self.setup, error):
            raise error
        for client in clients:
            if client.error is None and client.task.client in error.client_ids:
                client.error = error


class StackedStep(Passes):
    """The passes of one step of some clients."""

    def __init__(self, lane: StackedLane, clients: Group, rows: Rows, batch: Tensors) -> None:
        self._lane, self._clients, self._rows, self._batch = lane, clients, rows, batch
        self.count, self.is_plain = 0, True

    def __call__(self, objective: Objective | None = None, *operands: Tensor) -> tuple[Tensor, Gradients]:
        self.count, self.is_plain = self.count + 1, self.is_plain and objective is None
        return self._lane.run(self._clients, self._rows, self._batch, objective, *operands)

    def outputs_of(self, w: Tensor) -> Tensor:
        """See `Passes.outputs_of`."""
        if self._clients[0].task.step.start is not None and w.data_ptr() != self._rows["start"].data_ptr():
            raise ValueError(TEACHER_NEEDS)
        self.is_plain = False
        return self._lane.outputs_of(self._clients, w, self._batch)


class StackedBeginning(Passes):
    """The passes of some clients before their first step. Batches of one shape share a pass."""

    def __init__(self, lane: StackedLane, clients: Group) -> None:
        self._lane, self._clients = lane, clients
        self._places = {client: place for place, client in enumerate(clients)}

    def first(self, batches: int) -> tuple[Tensor, Tensor]:
        """See `Passes.first`."""
        norms = self._lane.rows.z.new_zeros(len(self._clients), 1, dtype=torch.float64)
        return self._mean_gradients(lambda task: task.first_batches(batches), norms), norms

    def all(self) -> Tensor:
        """See `Passes.all`."""
        return self._mean_gradients(Task.all_batches)

    def _mean_gradients(
        self, batches_of: Callable[[Task], Iterator[WeightedBatch]], norms: Tensor | None = None
    ) -> Tensor:
        """Return each client's mean gradient over batches, `[clients, row_size]`, and add the mean of its norms to
        `norms`, float64 `[clients, 1]`."""
        z, module = self._lane.rows.z, self._lane.replica.module
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
                        self._lane.leave_out([client for client, *_ in group], error)
        finally:
            module.train()
        return total

    def _next(self, client: StackedClient, batches: Iterator[tuple[Tensors, float]]) -> WeightedPart | None:
        """Return the client's next batch, or None after the last one, and for a client that is excluded."""
        try:
            batch = None if client.error is not None else next(batches, None)
        except ClientError as error:
            self._lane.leave_out([client], error)
            return None
        return None if batch is None else (client, *batch)

    def _add(self, group: Sequence[WeightedPart], total: Tensor, norms: Tensor | None) -> None:
        """Add the gradients of a batch of some clients to their rows of `total`, and the norms of their gradients."""
        clients, batches, shares = zip(*group, strict=True)
        rows = self._lane.gather(clients)
        batch = tuple(map(torch.stack, zip(*batches, strict=True)))
        _, gradients = self._lane.run(clients, rows, self._lane.with_keys(clients, batch))
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
