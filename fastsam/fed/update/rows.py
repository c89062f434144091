"""n clients as the rows of one memory, and the fused kernels on them.

    begin       the start, the hyperparameters and the tensors of a round
    perturb     norm_, perturb_: z = w + eps
    update      update_norm_ with clipping, then update_ with the rule of the run's optimizer
    results     what a round has changed, in new memory

A step (`fastsam.fed.update.steps`) says which of them are called, and in which order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fastsam.fed.common.transfer import to_device
from fastsam.fed.update.gradients import Gradients
from fastsam.fed.update.row_memory import KeyFacts, RowMemory, RunFacts, StepFacts
from fastsam.fed.update.rules import STEP
from fastsam_kernels.hparams import HParam


class Rows:
    """n clients in one memory: fields by name, hyperparameters by row, and the kernels on them.

    `rows["q"]` is a field of vectors `[n, row_size]` in the dtype of the weights, `rows.number("c")` a field of
    numbers, float64 `[n, 1]`. A field is zero when it is first used, and then has the numbers of the last client.
    `rows["start"]` is always there: the weights from which deltas are measured, perhaps one row for all.

    Args:
        setup: facts of the run.
        n: number of rows.
        copies: every tensor of a round is copied into a field, so that captured steps and other windows of the memory
            find it there. Otherwise the only row refers to tensors that a step only reads.

    Attributes:
        z: `[n, row_size]`, the weights that autograd sees.
        w: the unperturbed weights, for steps of two buffers, else None.
        hparams: hyperparameters, float64 `[n, 1, NUM_HPARAMS]`.
        losses: running sums of the losses, float64 `[n]`.
        rule: rule of the updates; state: its fields; counts: its numbers of steps.
        key: key of the steps in the rows, None before the first.
        may_end: a client may end with the present step, so that its results are read then. True in captures.
        is_moved: `z` is not at the unperturbed weights.
    """

    def __init__(self, setup: RunFacts, n: int = 1, copies: bool = False) -> None:
        self._take(RowMemory(setup, n), slice(0, n), copies)

    def _take(self, memory: RowMemory, place: slice, copies: bool) -> None:
        self.memory, self.place, self.copies, self.n = memory, place, copies, place.stop - place.start
        self.kernels, self.layout, self.rule, self.options = memory.kernels, memory.layout, memory.rule, memory.options
        self._fields: dict[str, Tensor] = {}
        self._references: dict[str, Tensor] = {}  # vectors of the round that steps only read
        self._parts: dict[tuple[int, int], Rows] = {}
        scalars = {name: x[place] for name, x in memory.scalars.items()}
        self.hparams, self.losses, self.sumsq = scalars["hparams"], scalars["losses"], scalars["sumsq"]
        self.sumsq_v, self.counts = scalars.get("sumsq_v"), scalars.get("counts")
        self.z = self["z"]
        self.state = [None if name is None else self[name] for name in self.rule.fields]
        self._starting_values = [
            (field, value)
            for field, value in (*zip(self.state, self.rule.initial_values, strict=True), (self.counts, 0.0))
            if field is not None
        ]
        self._leaves: list[Tensor] | None = None
        self.w: Tensor | None = None
        self.key: KeyFacts | None = None
        self._has_q, self.may_end, self.is_moved = False, True, False
        self._first_state: Mapping[str, Tensor] = {}
        self._numel = len(self.layout.segments)

    def __getitem__(self, name: str) -> Tensor:
        x = self._references.get(name)
        if x is None:
            x = self._fields.get(name)
        if x is None:
            x = self._fields[name] = self.memory.field(name)[self.place]
        return x

    def number(self, name: str, width: int = 1) -> Tensor:
        """Return a field of numbers, float64 `[n, width]`."""
        return self.memory.number(name, width)[self.place]

    def part(self, begin: int, end: int) -> Rows:
        """Return neighbouring rows, counted in these."""
        if (begin, end) not in self._parts:
            part = object.__new__(type(self))
            first = self.place.start
            part._take(self.memory, slice(first + begin, first + end), self.copies)
            self._parts[begin, end] = part
        return self._parts[begin, end]

    @property
    def leaves(self) -> list[Tensor]:
        """One view `[n, *shape]` per parameter, for autograd."""
        if self._leaves is None:
            self._leaves = [view.detach().requires_grad_() for view in self.layout.views(self.z)]
        return self._leaves

    # --- the beginning of a round ---

    def select(self, key: KeyFacts) -> None:
        """Take the fields on which steps of a key work."""
        self.key, self._has_q = key, "q" in key.given
        self.w = self["w"] if key.two_buffers else None
        self._references = {}
        if self.copies and "start" not in key.given and self.memory.start is not None:
            self._references["start"] = self.memory.start.expand(self.n, -1)

    def begin(self, step: StepFacts, w: Tensor, lr: float) -> None:
        """Begin a round of one client per row.

        Args:
            step: the step of the n clients.
            w: the global model, `[row_size]`.
            lr: learning rate of the round.
        """
        start, has_common_start = w if step.start is None else step.start, "start" not in step.key.given
        self.memory.write_numbers(self.place, step, lr)
        if self.copies and has_common_start:
            self.memory.write_start(w)
        self.select(step.key)
        if not (self.copies and has_common_start):
            self.put("start", start)
        for name, x in step.tensors.items():
            if name != "start":
                self.put(name, x, copies=name in step.outputs)
        self._first_state = step.state or {}
        self.restart(start)
        self.losses.zero_()

    def put(self, name: str, x: Tensor, copies: bool = False) -> None:
        """Write a tensor `[row_size]`, `[n or 1, row_size]` or `[n or 1, 1]` into the field of its name. The only row
        may refer to a vector, unless `copies` says that the field will be written."""
        if x.shape[-1] == 1:
            self.number(name).copy_(x)
        elif copies or self.copies:
            self._references.pop(name, None)
            self[name].copy_(x)
        else:
            self._references[name] = x.view(-1, self.layout.row_size)

    def own(self, name: str) -> Tensor:
        """Return a field that may be written, with the present values."""
        if name in self._references:
            self.put(name, self._references[name], copies=True)
        return self[name]

    def restart(self, start: Tensor) -> None:
        """Write weights (`[row_size]` or `[n, row_size]`) to every row, and the state of the rule at the start."""
        self.z.copy_(start)
        if self.w is not None:
            self.w.copy_(start)
        self.is_moved = False
        for field, value in self._starting_values:
            field.fill_(value)
        if self._first_state:
            fields = self.rule_fields
            for name, x in self._first_state.items():
                fields[name].copy_(x)

    @property
    def rule_fields(self) -> dict[str, Tensor]:
        """The state of the rule by name, each `[n, ...]`."""
        fields = zip((*self.rule.fields, STEP), (*self.state, self.counts), strict=True)
        return {name: field for name, field in fields if name is not None and field is not None}

    # --- a step ---

    def set_rates(self, rates: Sequence[float], index: Tensor | None = None) -> None:
        """Set the learning rate of the next step, for each row, or for the rows at `index` (int64)."""
        column = to_device(torch.tensor(rates, dtype=torch.float64), self.hparams.device)
        lr = self.hparams[:, 0, HParam.LR]
        if index is None:
            lr.copy_(column)
        else:
            lr.index_copy_(0, index, column)

    def column(self, column: int) -> Tensor:
        """Return a column of the hyperparameters, float64 `[n, 1]`, which a step may write."""
        return self.hparams.select(2, column)

    def views_like(self, g: Gradients, field: Tensor) -> list[Tensor]:
        """Return views of a field, one for each gradient and shaped like it."""
        views = self.layout.views(field)
        return [views[i].view_as(t) for i, t in zip(g.slots, g.tensors, strict=True)]

    def whole(self, d: Tensor) -> Gradients:
        """Return rows `[n, row_size]` as a direction, or as gradients of all parameters."""
        return Gradients([d], tuple(range(self._numel)), self.layout.table)

    def perturb(self, g: Gradients, adaptive: bool = False) -> None:
        """Set `z = w + rho*d/(||d|| + nu)` along gradients, or along T^2*g with `adaptive`."""
        self.norm(g, adaptive)
        self.move(g)

    def norm(self, g: Gradients, adaptive: bool = False) -> None:
        """Compute the norm of a direction, by which `move` divides."""
        self.kernels.norm_(self.sumsq, g.tensors, [self.w] if adaptive else [], g.table, self.hparams)

    def move(self, g: Gradients, z: Tensor | None = None, w: Tensor | None = None) -> None:
        """Set `z = w + rho*d/(||d|| + nu)` along gradients whose norm is known; z and w are other rows if given."""
        w = self.w if w is None else w
        assert w is not None  # steps that perturb have two buffers
        self.kernels.perturb_([self.z if z is None else z], w, g.tensors, g.table, self.hparams, self.sumsq, False)
        self.is_moved = True

    def restore(self) -> None:
        """Return to the unperturbed weights."""
        if self.w is not None:
            self.z.copy_(self.w)
        self.is_moved = False

    def update(self, g: Gradients, g1: Gradients | None = None, shift: Tensor | None = None) -> None:
        """Take the step of the run's optimizer at the unperturbed weights: `z = w = U(w, a*g + b*g1 + q)`.

        Args:
            g: gradients. Parameters without one keep their unperturbed weights.
            g1: gradients at the unperturbed weights, for steps with a weight b.
            shift: a constant perturbation of the weights, see `Shifted`.
        """
        if self.w is not None and len(g.slots) < self._numel:
            self.z.copy_(self.w)
        first, q = None if g1 is None else g1.like(g), self["q"] if self._has_q else None
        if self.sumsq_v is not None:
            self.kernels.update_norm_(self.sumsq_v, [self.z], self.w, g.tensors, g.table, self.hparams, g1=first, q=q)
        self.kernels.update_(
            [self.z], self.w, g.tensors, g.table, self.hparams, self.rule.name, self.state,
            steps=self.counts, g1=first, sumsq_v=self.sumsq_v, write_master=self.w is not None, q=q, shift=shift,
        )  # fmt: skip
        self.is_moved = False

    # --- the end of a round ---

    @property
    def vectors(self) -> int:
        """The number of vectors that a row has, with the vectors of its step."""
        names = {*self.memory.arena.names, *self._references}
        is_common = self.key is None or "start" not in self.key.given
        return len(names - {"start"} if is_common else names)

    def optimizer_state(self) -> dict[str, Tensor]:
        """Return the state of the rule by name, each `[n, ...]`, in new memory."""
        return {name: field.clone() for name, field in self.rule_fields.items()}

    def results(self, has_state: bool, delta: Tensor | None = None) -> dict[str, Any]:
        """Return the tensors of `ClientResults`, in new memory.

        Args:
            has_state: the state of the rule is a result.
            delta: displacement of the rows from the start, if it is known.

        Raises:
            ValueError: the step has an output that is not a field of the rows.
        """
        assert self.key is not None
        kind = self.key.kind
        return {
            "delta": self.z - self["start"] if delta is None else delta,
            "outputs": {name: self._output(kind.__name__, name).clone() for name in kind.outputs},
            "optimizer_state": self.optimizer_state() if has_state else None,
        }

    def _output(self, kind: str, name: str) -> Tensor:
        if name in self.memory.numbers:
            return self.number(name)
        if name in self._references or name in self.memory.arena:
            return self[name]
        raise ValueError(
            f"{kind}.outputs names {name!r}, which is not a field of the rows. Write it in begin() or __call__(): "
            f"rows.put({name!r}, x)"
        )
