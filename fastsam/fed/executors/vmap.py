"""Stacked clients: the rows of an arena take their local steps together, `torch.vmap` over the model, the row kernels
over the rows."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from operator import attrgetter

import torch
from torch import Tensor

from fastsam.fed.clients.samples import Tensors
from fastsam.fed.common.transfer import to_device
from fastsam.fed.executors import rowprograms, stacked, step_graphs
from fastsam.fed.executors.base import ClientError, ClientOutcome, Executor, excludes
from fastsam.fed.executors.memory_errors import name_slots
from fastsam.fed.executors.randomness import NoRandomness
from fastsam.fed.executors.rowprograms.row_steps import RowSteps
from fastsam.fed.executors.stacked_client import (
    Group,
    StackedClient,
    client_error,
    gather_samples,
    next_indices,
    results_of,
    runs,
)
from fastsam.fed.executors.stacked_lane import StackedBeginning, StackedLane
from fastsam.fed.executors.task import Setup, Task, sort_of, step_of
from fastsam.fed.update.results import ClientResults
from fastsam.fed.update.rows import Rows

NUMBERS = 3  # number of the changes of its bits: a run that began with other bits is not resumed
_SLOT = attrgetter("slot")


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
        self.lane = StackedLane(setup, self.rows, self.slots)
        self.row_steps = RowSteps(setup, self.lane.passes.replays, self.rows)
        self.random = NoRandomness(setup.device)

    def train(self, start: Tensor, buffers: Sequence[Tensor], tasks: Iterable[Task]) -> Iterator[ClientOutcome]:
        """See `Executor.train`."""
        for buffer, new in zip(self.lane.replica.buffers, buffers, strict=True):
            buffer.copy_(new)
        self.start, self.buffers = start, buffers
        active: list[StackedClient] = []
        source, free = iter(tasks), list(range(self.slots))
        with self.random.preserve_states():
            while True:
                clients = sorted([*active, *self._open(source, free)], key=_SLOT)
                if not clients:
                    return
                self._tick([client for client in clients if not client.is_finished])
                active, ended = [], list[StackedClient]()
                for client in clients:
                    (ended if client.is_finished else active).append(client)
                if ended:
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
            step_of(tasks_of_group).begin(rows, self.start, group[0].task.lr, StackedBeginning(self.lane, group))
        return clients

    def _close(self, clients: Group) -> Iterator[ClientResults]:
        """Yield the results of finished clients, in groups with the same fields. Raises ClientError if a pass has
        changed the model, which stacked clients share."""
        if clients:
            self.lane.check_model(clients)
        groups: dict[object, list[StackedClient]] = {}
        for client in clients:
            groups.setdefault(sort_of(client.task.step), []).append(client)
        for group in groups.values():
            yield results_of(group, self.lane.gather(group), self.buffers)

    # --- steps ---

    def _tick(self, clients: Group) -> None:
        """Take the next steps of the clients that have a whole batch, or of all."""
        groups: dict[Hashable, list[StackedClient]] = {}
        for client in self._train_by_rows(clients):
            groups.setdefault((client.key, client.size, client.shapes), []).append(client)
        whole = [group for group in groups.values() if group[0].size == self.setup.options.batch_size]
        for group in whole or list(groups.values()):
            try:
                if self.graphs is None or not self.graphs.serves(group):
                    self._take_steps(group)
                else:
                    self.graphs.train(group, self.row_steps, self.lane.scratch, partial(self.lane.take_step, group))
            except ClientError as error:
                self.lane.leave_out(group, error)

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

    def _take_steps(self, clients: Group) -> None:
        """Take steps of clients until one of them has no other batch of this size, or row programs can go on."""
        clients, batches = self._next_batches(clients)
        if not clients:
            return
        rows = self.lane.gather(clients)
        for batch in batches:
            if clients[0].key.has_rate:
                rows.set_rates([c.rate for c in clients])
            rows.may_end = any(c.k + 1 == c.steps for c in clients)
            passes = self.lane.take_step(clients, rows, self.lane.with_keys(clients, batch))
            rows.may_end = True
            for client in clients:
                client.advance(1, passes.count)
            if any(c.error is not None for c in clients) or self.row_steps.serves(clients[0]):
                break
        self.lane.put_back(clients, rows)

    def _next_batches(self, clients: Group) -> tuple[Group, Iterable[Tensors]]:
        """Return clients and their next batches of one size, each tensor `[clients, batch, ...]`. Samples that are not
        in a store have one batch, and a client for which it raises is left out."""
        if self.setup.population.clients.store is not None and clients[0].batches is None:
            is_whole = clients[0].size == self.setup.options.batch_size
            samples, steps = clients[0].samples, min(client.equal_steps() for client in clients) if is_whole else 1
            indices = to_device(next_indices(clients, steps), samples[0].device)
            return clients, (gather_samples(samples, places) for places in indices.split(clients[0].size, 1))
        batches = {}
        for client in clients:
            try:
                batches[client] = client.next_batch()
            except Exception as error:
                self.lane.leave_out([client], client.error_of(error))
        return list(batches), [tuple(map(torch.stack, zip(*batches.values(), strict=True)))]
