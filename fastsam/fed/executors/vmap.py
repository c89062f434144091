"""Stacked clients: the rows of an arena take their local steps together, `torch.vmap` over the model, the row kernels over the rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from operator import attrgetter

import torch
from torch import Tensor

from ..localstep import LocalStep, RowEnds, Snapshot
from ..replica import Replica
from . import compiled, epochs, stacked
from .base import Setup, Task, vectors_of
from .client import Client, begun, ended, failed, one_feed
from .feed import Batch, alike
from .form import Form, Kind, Rows
from .randomness import NoRandomness
from .row import check_vectors

_SLOT = attrgetter("slot")
_WRITTEN = ("z", "w", "momentum", "mu", "eps")  # fields that a step writes; the others are only read


class Vmap:
    """`slots` rows in lock step. Rows whose batches have one shape run together, a partial batch at its exact shape; a finished row is
    refilled. Agrees with the plain executor to rounding; the same number of slots gives the same bits.

    Raises ValueError for a model that cannot be mapped, with the reason.
    """

    longest_first = True

    def __init__(self, setup: Setup) -> None:
        reason = stacked.why_not(setup)
        if reason is not None:
            raise ValueError(
                f"executor 'vmap' cannot serve here: {reason}. Use executor='auto', which takes one that can, or 'sequential'"
            )
        if setup.compile and (reason := compiled.why_not(setup)) is not None:
            raise ValueError(f"compile=True: {reason}. Use compile=False")
        self.setup, self.layout = setup, setup.layout
        self.slots = self.stacks = setup.slots or stacked.slots_of(setup)
        self.numbers = f"vmap, {self.slots} slots" + (", compiled" if setup.compile else "")
        self.rows = Rows(setup, self.slots)
        self.scratch: Rows | None = None
        self.replica = Replica(setup.model, setup.layout, self.rows.field("z")[0])
        self.passes = stacked.StackedPasses(self.replica, setup.layout, setup)
        self.common = compiled.common_sizes(setup.sizes, self.slots)
        self.compiled = compiled.Steps(self.passes, setup.options) if setup.compile else None
        if self.compiled is not None and setup.example is not None:
            x, y = setup.example
            self.passes.traced.run(
                Form(self.rows, slice(0, 1)).leaves, x[None], y[None]
            )  # says when nothing can be frozen
        self.losses = torch.zeros(self.slots, dtype=torch.float64, device=setup.device)
        self.random = NoRandomness(setup.device)
        self._forms: dict[tuple[int, int], Form] = {}
        self._kinds: dict[Kind, Kind] = {}
        self._shapes: dict[tuple[object, ...], int] = {}
        self.replica.module.train()

    def train(self, start: Tensor, buffers: Sequence[Tensor], tasks: Iterable[Task]) -> Iterator[RowEnds]:
        """See `Executor.train`."""
        for own, new in zip(self.replica.buffers, buffers, strict=True):
            own.copy_(new)
        self.start, self.buffers = start, buffers
        source, active, free = iter(tasks), list[Client](), list(range(self.slots))
        with self.random.guarded():
            while True:
                opened = self._opened(source, free) if free else []
                if opened:
                    active = sorted([*active, *opened], key=_SLOT)
                    free = free[len(opened) :]
                if not active:
                    return
                self._tick(active)
                done = [c for c in active if c.k == c.steps]
                if done:
                    active = [c for c in active if c.k < c.steps]
                    free = sorted([*free, *map(_SLOT, done)])
                    yield from self._closed(done)

    # --- beginning ---

    def _opened(self, tasks: Iterator[Task], free: Sequence[int]) -> list[Client]:
        """Tasks in the free slots, as many as there are of both."""
        taken = list(zip(free, tasks, strict=False))
        steps = {id(task.step): task.step for _, task in taken}
        kinds = {key: self._kind(step) for key, step in steps.items()}
        opened: list[Client] = []
        for _, pairs in groupby(enumerate(taken), key=lambda pair: (pair[1][0] - pair[0], kinds[id(pair[1][1].step)])):
            neighbours = [slot_and_task for _, slot_and_task in pairs]
            kind, began = kinds[id(neighbours[0][1].step)], len(opened)
            for _, group in groupby(neighbours, key=lambda pair: alike(pair[1])):
                opened += begun(list(group), kind, self._shapes)
            self._begin(opened[began:])
        return opened

    def _kind(self, step: LocalStep) -> Kind:
        """Raises ValueError for a step that stacked rows cannot take."""
        check_vectors(step, self.start, stacked=True)
        if step.input_map is not None:
            raise ValueError(f"executor 'vmap' cannot serve here: {stacked.MAPS_INPUTS}. Use executor='sequential'")
        kind = Kind.of(step)
        return self._kinds.setdefault(kind, kind)

    def _begin(self, clients: list[Client]) -> None:
        """Neighbouring rows of one kind, from the start of their round. What they share is written to all of them at once."""
        form, tasks = self._form(clients), [client.task for client in clients]
        first = tasks[0]
        shared = all(task.step is first.step for task in tasks)
        steps = [first.step] if shared else [task.step for task in tasks]
        numbers = [self.rows.numbers(step, first.lr) for step in steps]
        form.hyper.copy_(torch.tensor(numbers, dtype=torch.float64)[:, None])
        self.losses[form.part].zero_()
        form.arrange(clients[0].kind)
        form.begin_(self.start)
        for name in ("q", "mu", "s"):
            vectors = vectors_of(tasks, name)
            if vectors is not None:
                form.field(name).copy_(vectors)
        if any(step.full_gradient for step in steps):
            self._full_gradients([c for c in clients if c.task.step.full_gradient])
        if (e := vectors_of(tasks, "e")) is not None:
            form.shift_(e)

    def _full_gradients(self, clients: list[Client]) -> None:
        """Each client's mean gradient over all its samples, in evaluation mode, into the field "gradient"."""
        into, size = self.rows.field("gradient"), clients[0].task.batch_size
        for client in clients:
            into[client.slot].zero_()
        waiting = [(c, iter(zip(c.task.x.split(size), c.task.y.split(size), strict=True))) for c in clients]
        self.replica.module.eval()
        try:
            while waiting:
                taken = [(c, batches, next(batches, None)) for c, batches in waiting]
                waiting = [(c, batches) for c, batches, batch in taken if batch is not None]
                ready = sorted(((c, b) for c, _, b in taken if b is not None), key=lambda pair: len(pair[1][1]))
                for n, group in groupby(ready, key=lambda pair: len(pair[1][1])):
                    self._add_gradients(n, list(group), into)
        finally:
            self.replica.module.train()

    def _add_gradients(self, n: int, pairs: list[tuple[Client, tuple[Tensor, Tensor]]], into: Tensor) -> None:
        clients = [c for c, _ in pairs]
        form = self._gathered(clients)
        _, gradients = self._pass(
            clients, form, *(torch.stack(part) for part in zip(*(b for _, b in pairs), strict=True))
        )
        views = self.layout.views(into)
        for i, client in enumerate(clients):
            client.extra_backprops += 1
            for slot, g in zip(gradients.slots, gradients.tensors, strict=True):
                views[slot][client.slot].add_(g[i], alpha=n / client.task.samples)

    # --- steps ---

    def _tick(self, clients: list[Client]) -> None:
        """One local step of every client."""
        self.busy = len(clients)
        for group in self._alike(clients):
            if self._epoch(group) or (self.compiled is not None and self._chunk(self.compiled, group)):
                continue
            x, y = self._batch(group)
            form = self._gathered(group)
            form.arrange(group[0].kind)
            losses = self._step(group, form, x, y)
            self._return(group, form)
            counted = losses.double() * y.shape[1]
            if form.rows is self.rows:
                self.losses[form.part].add_(counted)
            else:
                self.losses.index_add_(0, self._index(group), counted)
            for client in group:
                client.k += 1

    def _alike(self, clients: list[Client]) -> Iterable[list[Client]]:
        """Those whose next batches have one shape."""
        if one_feed(clients):
            return [clients]
        groups: dict[object, list[Client]] = {}
        for client in clients:
            groups.setdefault(client.shape, []).append(client)
        return groups.values()

    def _epoch(self, clients: list[Client]) -> bool:
        """What is left of an epoch natively, down to the last partial batch. False where it cannot be so."""
        if not one_feed(clients):
            return False
        count, batch = epochs.reach(clients)
        known = epochs.row_pass(self.passes.traced, clients, batch)
        if known is None:
            return False
        form = self._gathered(clients)
        form.arrange(clients[0].kind)
        try:
            epochs.take_(clients, form, known, count, batch, self.losses[form.part])
        except Exception as error:
            raise failed(clients, error) from error
        return True

    def _chunk(self, steps: compiled.Steps, clients: list[Client]) -> bool:
        """Several steps at once, compiled: where all busy rows began together and stay alike, and their number of samples is a common one.

        False where it is not so. Rows that are not busy take the steps as well, so that there is one shape to compile.
        """
        feed, first, n = clients[0].feed, clients[0], len(clients)
        samples, size = first.task.samples, first.task.batch_size
        epoch = -(-samples // size)
        if feed is None or n != len(feed.tasks) or n != self.busy or first.slot or (first.k % epoch) % compiled.CHUNK:
            return False
        if self.passes.traced.reason is not None:  # a compiled chunk would freeze what changes
            return False
        if samples not in self.common or 2 * n < self.slots or any(c.task.snapshots for c in clients):
            return False
        form = self._prepared(self._part(0, self.slots), clients)
        form.arrange(first.kind)
        count = min(compiled.CHUNK, epoch - first.k % epoch)
        chunk = feed.span(first.k, count, self.slots)
        try:
            steps.run_(first.kind, compiled.fields_of(form), form.hyper, self.losses, chunk, size)
        except Exception as error:
            raise failed(clients, error) from error
        for client in clients:
            client.k += count
        return True

    def _batch(self, clients: list[Client]) -> Batch:
        """The next batches, stacked."""
        feed = clients[0].feed
        try:
            if feed is not None and one_feed(clients):
                return feed.get(clients[0].k)
            x, y = zip(*(client.batch() for client in clients), strict=True)
        except Exception as error:
            raise failed(clients, error) from error
        return torch.stack(x), torch.stack(y)

    def _step(self, clients: list[Client], form: Form, x: Tensor, y: Tensor) -> Tensor:
        kept = [(i, c) for i, c in enumerate(clients) if c.k in c.task.snapshots]
        for i, client in kept:
            p = form.field("p")[i].clone() if form.kind.constant else None
            client.snapshots[client.k] = Snapshot(form.z[i].clone() if p is None else form.z[i] - p, p)
        losses, first = self._pass(clients, form, x, y)
        if not form.kind.two_passes:
            form.update_(first, None)
            return losses
        ends = clients[0].task.step.mu is not None and any(c.k + 1 == c.steps for c in clients)
        form.perturb_(first, form.field("eps") if ends else None)
        for i, client in kept:
            w = client.snapshots[client.k].w
            client.snapshots[client.k] = Snapshot(w, form.z[i] - w)
        _, second = self._pass(clients, form, x, y)
        form.update_(second, first)
        return losses

    def _pass(self, clients: list[Client], form: Form, x: Tensor, y: Tensor) -> tuple[Tensor, stacked.Gradients]:
        try:
            return self.passes.run(form, x, y)
        except Exception as error:
            raise failed(clients, error) from error

    # --- rows that are not neighbours ---

    def _form(self, clients: Sequence[Client]) -> Form:
        """Of neighbouring rows."""
        return self._part(clients[0].slot, clients[-1].slot + 1)

    def _part(self, begin: int, end: int) -> Form:
        found = self._forms.get((begin, end))
        if found is None:
            found = self._forms[begin, end] = Form(self.rows, slice(begin, end))
        return found

    def _gathered(self, clients: list[Client]) -> Form:
        """Their rows side by side: where they are, or copies, which `_return` takes back."""
        if clients[-1].slot - clients[0].slot + 1 == len(clients):
            return self._prepared(self._form(clients), clients)
        if self.scratch is None:
            self.scratch = Rows(self.setup, self.slots)
        index, part = self._index(clients), slice(0, len(clients))
        for name in self.rows.arena.names:
            torch.index_select(self.rows.field(name), 0, index, out=self.scratch.field(name)[part])
        torch.index_select(self.rows.hyper, 0, index, out=self.scratch.hyper[part])
        return self._prepared(Form(self.scratch, part), clients)

    def _prepared(self, form: Form, clients: list[Client]) -> Form:
        form.s = form.field("s") if clients[0].task.step.s is not None else None
        return form

    def _return(self, clients: list[Client], form: Form) -> None:
        if form.rows is self.rows:
            return
        index = self._index(clients)
        for name in _WRITTEN:
            if name in self.rows.arena or name in form.rows.arena:
                self.rows.field(name).index_copy_(0, index, form.field(name))

    def _index(self, clients: list[Client]) -> Tensor:
        return torch.tensor([c.slot for c in clients], device=self.setup.device)

    # --- the end ---

    def _closed(self, clients: list[Client]) -> Iterator[RowEnds]:
        """What finished clients leave behind, of those that leave the same things together."""
        groups: dict[tuple[bool, ...], list[Client]] = {}
        for client in clients:
            step = client.task.step
            groups.setdefault((step.e is None, step.mu is None, step.full_gradient), []).append(client)
        for group in groups.values():
            slots = [c.slot for c in group]
            neighbours = slots[-1] - slots[0] + 1 == len(slots)
            at = slice(slots[0], slots[-1] + 1) if neighbours else self._index(group)
            yield ended(group, self.rows, at, self.losses, self.start, self.buffers)
