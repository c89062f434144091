"""Stacked clients: the rows of an arena take their local steps together, `torch.vmap` over the model, the row kernels
over the rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby, islice
from operator import attrgetter

import torch
from torch import Tensor

from fastsam.fed.executors import epochs, stacked
from fastsam.fed.executors.base import ClientError, Ends, Executor, Setup, Task
from fastsam.fed.executors.batches import feed_keys
from fastsam.fed.executors.gradient_passes import Gradients
from fastsam.fed.executors.kernel_calls import Form
from fastsam.fed.executors.local_work import (
    Crew,
    Shared,
    client_error,
    crew_of,
    next_batch,
    row_ends,
    rows_to_keep,
    runs,
    slots_of,
)
from fastsam.fed.executors.randomness import NoRandomness
from fastsam.fed.executors.rowprograms import RowPass
from fastsam.fed.executors.stacked_rows import StackedRows
from fastsam.fed.executors.step_vectors import check_vectors, vectors_of
from fastsam.fed.step.local_update import ClientResults, LocalUpdate, Snapshot
from fastsam.fed.step.model_copy import Replica
from fastsam.fed.step.pilot import Pilot
from fastsam.fed.step.variant import StepVariant

_SLOT = attrgetter("slot")
Kept = tuple[int, dict[int, Snapshot], int]  # see `rows_to_keep`


class Vmap(Executor):
    """`slots` rows in lock step. Rows whose batches have one shape run together, a partial batch at its exact shape; a
    finished row is refilled. Agrees with the plain executor to rounding; the same number of slots gives the same bits.

    Raises ValueError for a model that cannot be mapped, with the reason.
    """

    name = "vmap"
    longest_first = stacks = True

    def __init__(self, setup: Setup) -> None:
        reason = stacked.why_not(setup)
        if reason is not None:
            raise ValueError(
                f"executor 'vmap' cannot serve here: {reason}. Use executor='auto', which takes one that can, or "
                f"'sequential'"
            )
        self.setup, self.layout = setup, setup.layout
        self.slots = setup.slots or stacked.slots_of(setup)
        self.numbers = f"vmap, {self.slots} slots"
        self.rows = StackedRows(setup, self.slots)
        self.replica = Replica(setup.model, setup.layout, self.rows.rows.field("z")[0])
        self.passes = stacked.StackedPasses(self.replica, setup.layout, setup)
        self.random = NoRandomness(setup.device)
        self.epochs = None if setup.excludes_errors else epochs.epochs_of(setup)  # a capture that fails is the end
        self._shapes: dict[tuple[object, ...], int] = {}
        self.replica.module.train()

    def train(self, start: Tensor, buffers: Sequence[Tensor], tasks: Iterable[Task]) -> Iterator[Ends]:
        """See `Executor.train`."""
        for own, new in zip(self.replica.buffers, buffers, strict=True):
            own.copy_(new)
        self.start, self.buffers = start, buffers
        active: list[Crew] = []
        source, free = iter(tasks), list(range(self.slots))
        with self.random.guarded():
            while True:
                opened = self._open(source, free) if free else []
                if opened:
                    active = sorted([*active, *opened], key=_SLOT)
                    free = free[sum(len(crew.tasks) for crew in opened) :]
                if not active:
                    return
                self._tick([crew for crew in active if not crew.done])
                done = [crew for crew in active if crew.done]
                if done:
                    active = [crew for crew in active if not crew.done]
                    free = sorted([*free, *slots_of(done)])
                    yield from {id(crew.error): crew.error for crew in done if crew.error is not None}.values()
                    yield from self._close([crew for crew in done if crew.error is None])

    # --- the beginning and the end of clients ---

    def _open(self, tasks: Iterator[Task], free: Sequence[int]) -> list[Crew]:
        """Tasks in the free slots, as many as there are of both."""
        new = list(islice(tasks, len(free)))
        opened: list[Crew] = []
        steps = {id(task.step): task.step for task in new}
        sorts = {
            key: (self._kind(step), step.full_gradient, step.pilot, step.start is None) for key, step in steps.items()
        }
        for part in runs([(free[i] - i, sorts[id(task.step)]) for i, task in enumerate(new)]):
            these, slots, (kind, full_gradient, pilot, _) = new[part], free[part], sorts[id(new[part.start].step)]
            crews = [crew_of(these[own], slots[own.start], kind, self._shapes) for own in runs(feed_keys(these))]
            self.rows.begin_(crews, self.start)
            if full_gradient or pilot is not None:
                self._first_gradients(crews, pilot)
            if kind.constant and (e := vectors_of(these, "direction_vector")) is not None:
                self.rows.form(crews).shift_(e)
            opened += crews
        return opened

    def _kind(self, step: LocalUpdate) -> StepVariant:
        """Return the variant of a step. Raises ValueError if its vectors are not like the weights."""
        check_vectors(step, self.start)
        return step.constants.variant

    def _first_gradients(self, crews: list[Crew], pilot: Pilot | None) -> None:
        """Each client's mean gradient over all its samples, or a pilot's batches, in evaluation mode, into the field
        "gradient"; with a pilot the radii that it makes of them."""
        form = self.rows.form(crews)
        gradients = form.field("gradient").zero_()
        if pilot is None:
            self._add_batches(crews, None)
            return
        for crew in crews:
            crew.norms = torch.zeros(len(crew.tasks), dtype=torch.float64, device=gradients.device)
        self._add_batches(crews, pilot)
        form.radius_(pilot, torch.cat([crew.norms for crew in crews if crew.norms is not None]), gradients)

    def _add_batches(self, crews: list[Crew], pilot: Pilot | None) -> None:
        """What clients take their gradients at the start on, those of one shape together."""
        waiting = [(crew, crew.at_start(pilot)) for crew in crews]
        self.replica.module.eval()
        try:
            while waiting:
                heads = [(crew, batches, self._next(crew, batches)) for crew, batches in waiting]
                waiting = [(crew, batches) for crew, batches, batch in heads if batch is not None]
                ready = sorted(((c, b) for c, _, b in heads if b is not None), key=lambda pair: pair[1][1].shape[1])
                for _, group in groupby(ready, key=lambda pair: pair[1][1].shape[1]):
                    pairs = list(group)
                    try:
                        self._add_gradients(pairs)
                    except ClientError as error:
                        self._leave_out([crew for crew, _ in pairs], error)
                waiting = [pair for pair in waiting if pair[0].error is None]
        finally:
            self.replica.module.train()

    def _next(self, crew: Crew, batches: Iterator[Shared]) -> Shared | None:
        """None behind the last one, and for a crew that is left out for its error."""
        try:
            return next(batches, None)
        except ClientError as error:
            self._leave_out([crew], error)
            return None

    def _add_gradients(self, pairs: list[tuple[Crew, Shared]]) -> None:
        crews = [crew for crew, _ in pairs]
        x, y = (torch.cat(part) for part in zip(*((x, y) for _, (x, y, _) in pairs), strict=True))
        _, gradients = self._pass(crews, self.rows.gathered(crews), x, y)
        views, row = self.layout.views(self.rows.rows.field("gradient")), 0
        norms = gradients.norms(len(x)) if crews[0].norms is not None else None
        for crew, (_, _, share) in pairs:
            crew.extra_backward_passes += 1
            rows = slice(row, row := row + len(crew.tasks))
            for slot, g in zip(gradients.slots, gradients.tensors, strict=True):
                views[slot][crew.slot : crew.end].add_(g[rows], alpha=share)
            if crew.norms is not None and norms is not None:
                crew.norms.add_(norms[rows], alpha=share)

    def _close(self, crews: list[Crew]) -> Iterator[ClientResults]:
        """What finished clients leave behind, of those that leave the same things together."""
        groups: dict[tuple[bool, ...], list[Crew]] = {}
        for crew in crews:
            step = crew.tasks[0].step
            sort = crew.kind.constant, step.start is None, step.dual is None, step.full_gradient, crew.kind.piloted
            groups.setdefault(sort, []).append(crew)
        for group in groups.values():
            yield row_ends(group, self.rows.gathered(group), self.start, self.buffers)

    # --- steps ---

    def _tick(self, crews: list[Crew]) -> None:
        """One local step of every client, or more where a row program or a graph takes them."""
        groups: dict[object, list[Crew]] = {}  # whose next batches have one shape
        for crew in crews:
            groups.setdefault(crew.shape, []).append(crew)
        for group in groups.values():
            try:
                if not (self._train_by_rows(group) or self._train_by_graph(group)):
                    self._step(group)
            except ClientError as error:
                self._leave_out(group, error)

    def _leave_out(self, crews: list[Crew], error: ClientError) -> None:
        """Nothing more is done for those of the crews whose error it is. Raises it where clients are not left out."""
        if not self.setup.excludes(error):
            raise error
        for crew in crews:
            if not set(error.client_ids).isdisjoint(task.client for task in crew.tasks):
                crew.error = error

    def _train_by_graph(self, crews: list[Crew]) -> bool:
        """The next epoch of a crew, from a captured graph. False where there is none."""
        if self.epochs is None or len(crews) > 1 or crews[0].kind.paced:
            return False
        form, replays = self.rows.gathered(crews), self.passes.replays
        return self.epochs.train(crews[0], form, replays, lambda x, y, ends: self._local_step(crews, form, x, y, ends))

    def _train_by_rows(self, crews: list[Crew]) -> bool:
        """The next steps of each crew, as many as have one shape, by a row program. False where there is none."""
        known = self.passes.replays.row_pass(crews[0].alike_steps[1], *crews[0].samples)
        if not isinstance(known, RowPass) or not all(map(known.serves, crews)):
            return False
        joins = known.side_by_side and crews[0].tasks[0].work.store is not None
        for together in [crews] if joins else [[crew] for crew in crews]:
            try:
                form = self.rows.gathered(together)
                known.train_(together, form)
                self.rows.put_back_(together, form)
            except Exception as error:
                raise client_error(together, error) from error
        return True

    def _step(self, crews: list[Crew]) -> None:
        """One step of clients whose batches have one shape."""
        x, y = next_batch(crews)
        form, kept = self.rows.gathered(crews), rows_to_keep(crews)
        for i, snapshots, k in kept:
            p = form.field("p")[i].clone() if form.kind.constant else None
            snapshots[k] = Snapshot(form.z[i].clone() if p is None else form.z[i] - p, p)
        self._local_step(crews, form, x, y, any(crew.k + 1 == crew.steps for crew in crews), kept)
        self.rows.put_back_(crews, form)
        for crew in crews:
            crew.k += 1

    def _local_step(
        self, crews: list[Crew], form: Form, x: Tensor, y: Tensor, ends: bool, kept: Sequence[Kept] = ()
    ) -> None:
        """What the device does in a step. ends: it is the last one of some; kept: rows whose perturbation is, too."""
        if form.kind.walks:
            form.walk_()
            for i, snapshots, k in kept:
                snapshots[k] = Snapshot(snapshots[k].w, form.z[i] - snapshots[k].w)
        losses, first = self._pass(crews, form, x, y)
        if form.kind.two_passes:
            form.perturb_(first, form.field("eps") if ends and form.s is not None else None)
            for i, snapshots, k in kept:
                snapshots[k] = Snapshot(snapshots[k].w, form.z[i] - snapshots[k].w)
            _, second = self._pass(crews, form, x, y)
            form.update_(second, first)
        else:
            form.update_(first, None)
        form.losses.add_(losses.double() * y.shape[1])

    def _pass(self, crews: list[Crew], form: Form, x: Tensor, y: Tensor) -> tuple[Tensor, Gradients]:
        try:
            return self.passes.run(form, x, y)
        except Exception as error:
            raise client_error(crews, error) from error
