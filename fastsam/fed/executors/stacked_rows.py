"""The rows in which stacked clients train: their forms, their beginnings, and copies side by side of rows that are not
neighbours."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fastsam.fed.executors.base import Setup, to_device
from fastsam.fed.executors.kernel_calls import Form, Rows
from fastsam.fed.executors.local_work import Crew, neighbours, slots_of, tasks_of
from fastsam.fed.executors.step_vectors import vectors_of

_INDICES = 256  # of sets of rows that are not neighbours, kept: the same ones come every round
_WRITTEN = ("z", "w", "momentum", "dual", "eps", "path", "last")  # fields that a step writes; the others are only read


class StackedRows:
    """`slots` rows, and as many beside them for copies once they are needed."""

    def __init__(self, setup: Setup, slots: int) -> None:
        self.setup, self.slots = setup, slots
        self.rows = Rows(setup, slots)
        self.scratch: Rows | None = None
        self._numbered: tuple[slice, list[tuple[float, ...]]] | None = None
        self._forms: dict[tuple[int, int], Form] = {}
        self._indices: dict[tuple[int, ...], Tensor] = {}

    def form(self, crews: Sequence[Crew]) -> Form:
        """Of neighbouring rows, where they are."""
        begin, end = crews[0].slot, crews[-1].end
        found = self._forms.get((begin, end))
        if found is None:
            found = self._forms[begin, end] = Form(self.rows, slice(begin, end))
        return found

    def begin_(self, crews: Sequence[Crew], start: Tensor) -> None:
        """Neighbouring rows of one kind, from the start of their round. What they share is written to all of them at
        once."""
        form, tasks = self.form(crews), tasks_of(crews)
        first = tasks[0]
        shared = all(task.step is first.step for task in tasks)
        steps = [first.step] if shared else [task.step for task in tasks]
        numbers = [self.rows.numbers(step, first.lr) for step in steps]
        if self._numbered != (form.part, numbers):  # most often what was written last is what is wanted
            form.hparams.copy_(to_device(torch.tensor(numbers, dtype=torch.float64).unsqueeze(1), form.hparams.device))
        self._numbered = None if crews[0].kind.rewrites else (form.part, numbers)
        form.losses.zero_()
        form.arrange(crews[0].kind)
        own = vectors_of(tasks, "start")
        form.begin_(start if own is None else own)
        if own is not None:
            form.field("begin").copy_(own)
        for name in ("gradient_offset", "dual", "server_perturbation", *crews[0].kind.vectors):
            vectors = vectors_of(tasks, name)
            if vectors is not None:
                form.field(name).copy_(vectors)
        form.vectors = {name: form.field(name) for name in crews[0].kind.vectors}

    def gathered(self, crews: Sequence[Crew]) -> Form:
        """Their rows side by side, ready for a step: where they are, or copies, which `put_back_` takes back."""
        form = self.form(crews) if neighbours(crews) else self._copied(crews)
        form.s = form.field("server_perturbation") if crews[0].tasks[0].step.server_perturbation is not None else None
        form.vectors = {name: form.field(name) for name in crews[0].kind.vectors}
        form.arrange(crews[0].kind)
        if crews[0].kind.paced:
            form.pace_([task.pace(crew.k, crew.steps) for crew in crews for task in crew.tasks])
        return form

    def _copied(self, crews: Sequence[Crew]) -> Form:
        if self.scratch is None:
            self.scratch = Rows(self.setup, self.slots)
        index = self._index(crews)
        form = Form(self.scratch, slice(0, len(index)))
        for name in self.rows.arena.names:
            torch.index_select(self.rows.field(name), 0, index, out=form.field(name))
        torch.index_select(self.rows.hparams, 0, index, out=form.hparams)
        torch.index_select(self.rows.losses, 0, index, out=form.losses)
        return form

    def put_back_(self, crews: Sequence[Crew], form: Form) -> None:
        """What a step wrote into copies, where they are copies."""
        if form.rows is self.rows:
            return
        index = self._index(crews)
        for name in _WRITTEN:
            if name in self.rows.arena or name in form.rows.arena:
                self.rows.field(name).index_copy_(0, index, form.field(name))
        self.rows.losses.index_copy_(0, index, form.losses)

    def _index(self, crews: Sequence[Crew]) -> Tensor:
        slots = tuple(slots_of(crews))
        if slots not in self._indices:
            if len(self._indices) == _INDICES:
                self._indices.clear()
            self._indices[slots] = to_device(torch.tensor(slots), self.setup.device)
        return self._indices[slots]
