"""Stacked clients: the rows of an arena take their local steps together, `torch.vmap` over the model, the row kernels
over the rows."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from operator import attrgetter
from typing import TypeVar

import torch
from torch import Tensor

from fastsam.fed.clients.samples import Tensors
from fastsam.fed.common.transfer import to_device
from fastsam.fed.executors import rowprograms, stacked, step_graphs
from fastsam.fed.executors.base import ClientError, ClientOutcome, Executor, excludes
from fastsam.fed.executors.memory_errors import name_slots
from fastsam.fed.executors.randomness import NoRandomness
from fastsam.fed.executors.rowprograms.row_steps import RowSteps
from fastsam.fed.executors.slow_calls import SlowCalls
from fastsam.fed.executors.stacked_client import (
    Group,
    StackedClient,
    are_neighbours,
    client_error,
    gather_samples,
    keys_of,
    next_indices,
    results_of,
    rows_to_keep,
    runs,
)
from fastsam.fed.executors.stacked_steps import StackedBeginning, StackedStep
from fastsam.fed.executors.task import Setup, Task, sort_of, step_of
from fastsam.fed.update.gradients import Gradients
from fastsam.fed.update.model_copy import Replica
from fastsam.fed.update.passes import Objective
from fastsam.fed.update.results import ClientResults
from fastsam.fed.update.rows import Rows
from fastsam.fed.update.scratch_rows import ScratchRows
from fastsam.fed.update.watched import take_step

NUMBERS = 3  # number of the changes of its bits: a run that began with other bits is not resumed
_SLOT = attrgetter("slot")

Result = TypeVar("Result")


class Vmap(Executor):
    """`slots` rows, each of one client; a row whose client has finished gets the next one. Agrees with the plain
    executor to rounding; the same number of slots gives the same bits.

    `_tick` takes the steps. Row programs are the first choice: they take all steps of all clients in one native call.
    Else the clients whose next batches have one size step together, at this exact size. Partial batches wait until no
    client has a whole one left, so that more of them meet others of their size. On a GPU such steps are captured.

    Raises:
        ValueError: the model cannot be mapped; the message has the reason.
    """

    name = "vmap"
    longest_first = stacks = True

    def __init__(self, setup: Setup) -> None:
        reason = stacked.why_not(setup)
        if reason is not None:
            raise ValueError(f"executor 'vmap' cannot serve here: {reason}. Use executor='auto' or 'sequential'")
        self.setup = setup
        self.slots = setup.options.slots or stacked.slots_of(setup)
        self.numbers = f"vmap {NUMBERS}, {self.slots} slots" + rowprograms.numbers(setup)
        self.graphs = step_graphs.step_graphs_of(setup, self.slots)
        with name_slots(self.slots):
            self.rows = Rows(setup, self.slots + (self.graphs is not None), copies=True)
        self.scratch: ScratchRows | None = None
        self.replica = Replica(setup.model, setup.layout, self.rows.z[0])
        self.passes = stacked.StackedPasses(self.replica, setup.layout, setup, SlowCalls(is_logged=True))
        self.row_steps = RowSteps(setup, self.passes.replays, self.rows)
        self.random = NoRandomness(setup.device)
        self.replica.module.train()

    def train(self, start: Tensor, buffers: Sequence[Tensor], tasks: Iterable[Task]) -> Iterator[ClientOutcome]:
        """See `Executor.train`."""
        for buffer, new in zip(self.replica.buffers, buffers, strict=True):
            buffer.copy_(new)
        self.start, self.buffers = start, buffers
        active: list[StackedClient] = []
        source, free = iter(tasks), list(range(self.slots))
        with self.random.preserve_states():
            while True:
                active = sorted([*active, *self._open(source, free)], key=_SLOT)
                if not active:
                    return
                self._tick([client for client in active if not client.is_finished])
                ended = [client for client in active if client.is_finished]
                if ended:
                    active = [client for client in active if not client.is_finished]
                    free = sorted([*free, *map(_SLOT, ended)])
                    yield from {id(client.error): client.error for client in ended if client.error is not None}.values()
                    yield from self._close([client for client in ended if client.error is None])

    def release(self) -> None:
        """See `Executor.release`."""
        if self.graphs is not None:
            self.graphs.release()

    # --- the beginning and the end of clients ---

    def _open(self, tasks: Iterator[Task], free: list[int]) -> list[StackedClient]:
        """Put tasks into the free slots, until there are no more tasks or slots."""
        clients = [StackedClient.of(task, slot) for task, slot in zip(islice(tasks, len(free)), free, strict=False)]
        del free[: len(clients)]
        sorts = {id(step): sort_of(step) for step in {id(c.task.step): c.task.step for c in clients}.values()}
        for part in runs([(c.slot - i, sorts[id(c.task.step)]) for i, c in enumerate(clients)]):
            group = clients[part]
            tasks_of_group = [c.task for c in group]
            rows = self.rows.part(group[0].slot, group[-1].slot + 1)
            step_of(tasks_of_group).begin(rows, self.start, group[0].task.lr, StackedBeginning(self, group))
        return clients

    def gather(self, clients: Group) -> Rows:
        """Return the clients' rows next to each other, ready for a step: the rows themselves, or copies, which
        `_put_back` copies back."""
        if not are_neighbours(clients):
            scratch = self._scratch
            return scratch.gather(scratch.index_of([c.slot for c in clients]), clients[0].key)
        rows = self.rows.part(clients[0].slot, clients[-1].slot + 1)
        rows.select(clients[0].key)
        return rows

    def _put_back(self, clients: Group, rows: Rows) -> None:
        """Copy the results of a step from copied rows to the rows."""
        if rows.memory is not self.rows.memory:
            self._scratch.put_back(self._scratch.index_of([c.slot for c in clients]), rows)

    @property
    def _scratch(self) -> ScratchRows:
        if self.scratch is None:
            self.scratch = ScratchRows(self.rows, self.setup, self.slots)
        return self.scratch

    def _close(self, clients: Group) -> Iterator[ClientResults]:
        """Yield the results of finished clients, in groups with the same fields. Raises ClientError if a pass has
        changed the model, which stacked clients share."""
        if clients:
            self._check_model(clients)
        groups: dict[object, list[StackedClient]] = {}
        for client in clients:
            groups.setdefault(sort_of(client.task.step), []).append(client)
        for group in groups.values():
            yield results_of(group, self.gather(group), self.buffers)

    # --- steps ---

    def _tick(self, clients: Group) -> None:
        """Take the next step of the clients that have a whole batch, or of all, or more if row programs or a graph take
        them."""
        groups: dict[Hashable, list[StackedClient]] = {}
        for client in self._train_by_rows(clients):
            groups.setdefault((client.key, client.size, client.shapes), []).append(client)
        whole = [group for group in groups.values() if group[0].size == self.setup.options.batch_size]
        for group in whole or list(groups.values()):
            try:
                if self.graphs is None or not self.graphs.serves(group):
                    self._step(group)
                else:
                    self.graphs.train(group, self.row_steps, self._scratch, partial(self._local_step, group))
            except ClientError as error:
                self.leave_out(group, error)

    def _train_by_rows(self, clients: Group) -> Group:
        """Take the next steps of the clients that have row programs. Return the other clients. Raises ClientError."""
        try:
            others = self.row_steps.train(clients)
        except Exception as error:
            raise client_error(clients, error) from error
        for client in clients:
            if client.error is not None and not excludes(self.setup, client.error):
                raise client.error
        return others

    def _step(self, clients: Group) -> None:
        """Take one step of clients."""
        clients, batch = self._next_batch(clients)
        if not clients:
            return
        rows = self.gather(clients)
        if clients[0].key.has_rate:
            rows.set_rates([c.rate for c in clients])
        rows.may_end = any(c.k + 1 == c.steps for c in clients)
        passes = self._local_step(clients, rows, batch)
        rows.may_end = True
        self._put_back(clients, rows)
        for client in clients:
            client.advance(1, passes.count)

    def _next_batch(self, clients: Group) -> tuple[Group, Tensors]:
        """Return clients and their next batch, each tensor `[clients, batch, ...]`. A client whose batch raises is
        excluded, and left out."""
        if self.setup.population.clients.store is not None and clients[0].batches is None:
            samples = clients[0].samples
            batch = gather_samples(samples, to_device(next_indices(clients), samples[0].device))
            return clients, self.with_keys(clients, batch)
        batches = {}
        for client in clients:
            try:
                batches[client] = client.next_batch()
            except Exception as error:
                self.leave_out([client], client.error_of(error))
        return list(batches), self.with_keys(
            list(batches), tuple(map(torch.stack, zip(*batches.values(), strict=True)))
        )

    def with_keys(self, clients: Group, batch: Tensors) -> Tensors:
        """Return a batch of clients, with the seeds of the dropout in their next steps if the model draws."""
        if not self.passes.draws or not clients:
            return batch
        keys = to_device(keys_of(clients), self.setup.device)
        return (*batch, keys.expand(-1, batch[0].shape[1]))

    def _local_step(self, clients: Group, rows: Rows, batch: Tensors) -> StackedStep:
        """Take a step of the clients' rows on the device on a batch, each `[rows, batch, ...]`. Add up the losses, and
        return the passes."""
        passes, step = StackedStep(self, clients, rows, batch), clients[0].task.step
        kept = rows_to_keep(clients)
        losses = take_step(step, rows, passes, kept) if kept else step(rows, passes)
        rows.losses.add_(losses.double() * batch[0].shape[1])
        return passes

    def run(
        self, clients: Group, rows: Rows, batch: Tensors, objective: Objective | None = None, *operands: Tensor
    ) -> tuple[Tensor, Gradients]:
        """Run a pass of clients, and return the losses and gradients of their rows."""

        def run(place: slice) -> tuple[Tensor, Gradients]:
            some, tensors = _part(rows, place), [t[place] for t in batch]
            if objective is None:
                return self.passes.run(some, *tensors)
            return self.passes.run_objective(some, tuple(tensors), objective, [t[place] for t in operands])

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
            self._check_model(clients, error)
            cause = error
        results = dict[int, Result]()
        for i, client in enumerate(clients if len(clients) > 1 else ()):
            try:
                results[i] = run(slice(i, i + 1))
            except Exception as error:
                self._check_model(clients, error)
                self.leave_out([client], client.error or client.error_of(error))
        if len(results) in (0, len(clients)):
            raise client_error(clients, cause) from cause
        other = next(iter(results.values()))
        return [results.get(i, other) for i in range(rows)]

    def _check_model(self, clients: Group, cause: Exception | None = None) -> None:
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


def _part(rows: Rows, place: slice) -> Rows:
    """Return some neighbours of rows."""
    return rows if place == slice(0, rows.n) else rows.part(place.start, place.stop)
