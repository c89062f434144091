"""The local step of n rows: the operands of the local update rule, its kernels in their order, and the results.

    begin               writes the start, the hyperparameters and the vectors of a round
    step                [perturb_along_path,] a pass, [perturb, a second pass,] update
    perturb             norm_, perturb_ along the first gradient, or along a direction made of it by torch's operations;
                        dual_norm_, dual_perturb_ with a dual (FedSMOO)
    perturb_along_path  norm_, perturb_ along a direction without a gradient, before the only pass
    start_shifted       norm_, perturb_ once a round, for a constant perturbation
    update              inner_ for GSAM, update_norm_ with clipping, then update_ with the rule of SGD
    results             what a round has changed, in new memory

`ClientTrainer` has one row, `vmap` n. A row program (`rowprograms/`) takes the same steps natively. The executors
decide when rows step, and on which batches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from fastsam.fed.common.transfer import to_device
from fastsam.fed.executors import directions
from fastsam.fed.executors.gradient_passes import Gradients
from fastsam.fed.executors.row_memory import RowMemory
from fastsam.fed.executors.task import Task, optimizer_states_of, vectors_of
from fastsam.fed.update.local_rule import STEP
from fastsam.fed.update.local_update import Direction, LocalUpdate, Snapshot
from fastsam.fed.update.pilot import Pilot
from fastsam.fed.update.variant import StepVariant
from fastsam.step import set_gsam_coefficients_
from fastsam_kernels.hparams import HParam

# A forward and backward pass on a batch: function of x, y, and whether it is the second pass of a step, at perturbed
# weights. It returns the losses and the gradients.
Pass = Callable[[Any, Any, bool], tuple[Tensor, Gradients]]
KeptRow = tuple[int, dict[int, Snapshot], int]  # a row that is copied: its index, the client's copies, and the step


class LocalRows:
    """Some neighbouring rows of a `RowMemory`, whose steps are of one variant.

    Args:
        memory: the memory.
        part: the rows.
        copies: every vector of a round is copied into a field, so that captured steps and other windows of the memory
            find it there. Otherwise the only row reads vectors where they are.

    Attributes:
        z: `[rows, row_size]`, the weights that autograd sees.
        w: the unperturbed weights, for steps that perturb by a gradient.
        q, s: further operands of the kernels, `[rows, row_size]`. The rows of s may be one.
        vectors: further vectors by name (`StepVariant.vectors`).
        losses: running sums of the losses, float64 `[rows]`.
        norms: with a pilot the mean norms of its gradients, float64 `[rows]`.
    """

    def __init__(self, memory: RowMemory, part: slice, copies: bool = False) -> None:
        self.memory, self.part, self.copies = memory, part, copies
        self.kernels, self.layout = memory.kernels, memory.layout
        self.z, self.hparams, self.losses = self.field("z"), memory.hparams[part], memory.losses[part]
        self.norms, self.sumsq, self.inner = memory.norms[part], memory.sumsq[part], memory.inner[part]
        self.rule = memory.rule
        self.counts = None if memory.counts is None else memory.counts[part]
        self.state = [None if name is None else self.field(name) for name in self.rule.fields]
        self.sumsq_v = None if memory.sumsq_v is None else memory.sumsq_v[part]
        self.s: Tensor | None = None
        self.vectors: dict[str, Tensor] = {}
        self._tasks: Sequence[Task] = ()  # tasks whose local updates have the state of the optimizer
        self._select(LocalUpdate().constants.variant)

    def field(self, name: str) -> Tensor:
        return self.memory.field(name)[self.part]

    @cached_property
    def leaves(self) -> list[Tensor]:
        """One view `[rows, *shape]` per parameter, for autograd."""
        return [view.detach().requires_grad_() for view in self.layout.views(self.z)]

    def set_variant(self, variant: StepVariant) -> None:
        """Take the fields that steps of `variant` work on, if the last steps were of another one."""
        if variant is not self.variant:
            self._select(variant)

    def _select(self, variant: StepVariant) -> None:
        """Select the fields and the calls of steps of `variant`, so that a step makes no decisions."""
        self.variant = variant
        self.w: Tensor | None = self.field("w") if variant.two_passes or variant.uses_path else None
        self.q: Tensor | None = (
            self.field("gradient_offset") if variant.has_q or (variant.constant and self.folds_shift) else None
        )
        shift = self.shift
        self._shift = {} if shift is None else {"shift": shift}
        starts = [self.z, self.w, self.field("origin") if variant.needs_origin else None]
        if self.copies:
            self.s = self.field("server_perturbation") if variant.has_dual else None
            self.vectors = {name: self.field(name) for name in variant.vectors}
        self._starts = [field for field in starts if field is not None]
        fields = [*zip(self.state, self.rule.initial_values, strict=True), (self.counts, 0.0)]
        fields += [(self.field(name), 0.0) for name in variant.memory]
        self._fills = [(field, value) for field, value in fields if field is not None]
        self._perturb, self._prepare = self._perturbation(), self._preparation()  # not bound: each would be a cycle

    def _perturbation(self) -> Callable[[LocalRows, Gradients, Tensor | None], None]:
        """Return the method that perturbs by a first gradient."""
        variant = self.variant
        if variant.direction is Direction.GRADIENT_MINUS_DUAL:
            return LocalRows._perturb_by_dual
        is_plain = variant.direction in (Direction.GRADIENT, Direction.ADAPTIVE_GRADIENT)
        if is_plain and not variant.anchor_weight:
            return LocalRows._perturb_by_gradient
        return LocalRows._perturb_by_direction

    def _preparation(self) -> Callable[[LocalRows, Gradients, Gradients | None], list[Tensor] | None] | None:
        """Return the method that prepares an update, or None if nothing has to be prepared."""
        variant = self.variant
        reads_first = variant.keeps_first or variant.surrogate or variant.uses_last_gradient
        if self.sumsq_v is not None or reads_first or variant.uses_path or variant.anchor_weight:
            return LocalRows._prepare_update
        return LocalRows._restore_unused if variant.two_passes else None

    @property
    def folds_shift(self) -> bool:
        """True if a constant perturbation p is folded into q as `-coefficient*p`, for the terms that belong to `w`."""
        options = self.memory.options
        inside = self.variant.has_phi or (options.clip_norm is None and self.rule.decay > 0)
        return inside and (options.clip_scope == "full" or options.clip_norm is None)

    @property
    def shift(self) -> Tensor | None:
        """p, where a constant perturbation cannot be folded into q: clipping does not scale the decay."""
        options = self.memory.options
        outside = self.rule.decay > 0 or (options.clip_scope != "full" and self.variant.has_phi)
        return self.field("p") if self.variant.constant and options.clip_norm is not None and outside else None

    # --- the beginning of a round ---

    def begin(self, tasks: Sequence[Task], start: Tensor) -> None:
        """Begin a round of one client per row, whose steps are of one variant.

        Args:
            tasks: tasks of the clients, with their vectors and numbers.
            start: weights at the start, `[row_size]` or `[rows, row_size]`.
        """
        update = tasks[0].update
        updates = [update] if all(task.update is update for task in tasks) else [task.update for task in tasks]
        self.memory.write_numbers(self.part, updates, tasks[0].lr)
        self.set_variant(update.constants.variant)
        self._tasks = tasks if self.variant.has_optimizer_state else ()
        self.restart(start)
        self.losses.zero_()
        if self.copies and self.variant.has_start:
            self.field("begin").copy_(start)
        if update.constants.vectors:
            self._read_vectors(tasks)

    def restart(self, start: Tensor) -> None:
        """Write the weights of the start (`[row_size]`, or `[rows, row_size]`) to every row, and the state of the rule
        at the start."""
        for field in self._starts:
            field.copy_(start)
        for field, value in self._fills:
            field.fill_(value)
        if self._tasks:
            self._read_optimizer_state(self._tasks)

    @property
    def optimizer_fields(self) -> dict[str, Tensor]:
        """The state of the rule by name, each `[rows, ...]`."""
        fields = zip((*self.rule.fields, STEP), (*self.state, self.counts), strict=True)
        return {name: field for name, field in fields if name is not None and field is not None}

    def _read_optimizer_state(self, tasks: Sequence[Task]) -> None:
        """Write the values that the local updates have for the state of the rule. Other fields keep their values."""
        fields = self.optimizer_fields
        for part, state in optimizer_states_of(tasks):
            for name, x in state.items():
                fields[name][part].copy_(x)

    def _read_vectors(self, tasks: Sequence[Task]) -> None:
        """Put the vectors of the local updates where the kernels read them."""
        variant = self.variant
        if (q := self._vector(tasks, "gradient_offset")) is not None:
            self.q = q
        if variant.has_dual and (dual := vectors_of(tasks, "dual")) is not None:
            self.s = self._vector(tasks, "server_perturbation")
            self.field("dual").copy_(dual)
        if variant.vectors:
            self.vectors = {name: v for name in variant.vectors if (v := self._vector(tasks, name)) is not None}

    def _vector(self, tasks: Sequence[Task], name: str) -> Tensor | None:
        """Return a vector of the local updates, `[rows, row_size]`, as the kernels read it."""
        v = vectors_of(tasks, name)
        if v is None:
            return None
        return self.field(name).copy_(v) if self.copies else v.view(-1, self.z.shape[1])

    def own_gradient_offset(self) -> Tensor:
        """Return the field into which a loop may write its gradient offset, `[rows, row_size]`. It has the values of
        the local update's vector, and the next updates read it."""
        field = self.field("gradient_offset")
        if self.q is not field and self.q is not None:
            self.q = field.copy_(self.q)
        return field

    def start_shifted(self, e: Tensor) -> None:
        """Start at `w^t + p` with `p = rho*e/(||e|| + nu)`, for e `[row_size]` or `[rows, row_size]`."""
        p, begin, rows = self.field("p"), self.field("begin"), e.expand_as(self.z)
        self._perturb_along([begin], self.z, rows)
        torch.sub(begin, self.z, out=p)
        self.z.copy_(begin)
        if self.folds_shift:
            phi, decay = self.hparams[:, :, HParam.PROX_MU], self.hparams[:, :, HParam.DECAY]
            inside = phi if self.sumsq_v is not None else phi + decay
            offset, correction = self.field("gradient_offset"), p * -inside.to(p.dtype)
            self.q = offset.copy_(correction if not self.variant.has_q or self.q is None else correction.add_(self.q))

    def set_radius(self, pilot: Pilot) -> None:
        """Set the radii that the pilot computes from the mean norms and gradients at the start."""
        self.hparams[:, 0, HParam.RHO].copy_(pilot.radii(self.norms, self.field("gradient")))

    def snapshot(self, row: int) -> Snapshot:
        """Return a copy of a row before a step, for measures along the path."""
        if not self.variant.constant:
            return Snapshot(self.z[row].clone())
        p = self.field("p")[row].clone()
        return Snapshot(self.z[row] - p, p)

    # --- the gradient at the start ---

    def clear_first(self) -> None:
        """Set the field of the mean gradient at the start, and the mean norms, to zero."""
        self.field("gradient").zero_()
        self.norms.zero_()

    def add_first(self, gradients: Gradients, share: float, rows: slice = slice(None)) -> None:
        """Add gradients at the start, of all rows or some, to their means with a weight of `share`. A batch without a
        label has the weight 0 and no gradient."""
        if not share:
            return
        views = self.layout.views(self.field("gradient")[rows])
        for slot, g in zip(gradients.slots, gradients.tensors, strict=True):
            views[slot].add_(g, alpha=share)
        if self.variant.has_pilot:
            self.norms[rows].add_(gradients.norms(len(self.z[rows])), alpha=share)

    # --- a step ---

    def step(self, run: Pass, x: Any, y: Any, kept: Sequence[KeptRow] = (), writes_eps: bool = False) -> Tensor:
        """Take a local step, and return the losses of its first pass.

        Args:
            run: the passes.
            x, y: the batch.
            kept: rows that are copied before the step, with their perturbation.
            writes_eps: store the perturbation of a step with a dual, for the results.
        """
        for i, snapshots, k in kept:
            snapshots[k] = self.snapshot(i)
        if self.variant.uses_path:
            self.perturb_along_path()
            self._keep_perturbations(kept)
        losses, first = run(x, y, False)
        if not self.variant.two_passes:
            self.update(first, None)
            return losses
        self.perturb(first, self.field("eps").zero_() if writes_eps and self.variant.has_dual else None)
        self._keep_perturbations(kept)
        _, second = run(x, y, True)
        self.update(second, first)
        return losses

    def _keep_perturbations(self, kept: Sequence[KeptRow]) -> None:
        """Add the present perturbation to the copies of rows."""
        for i, snapshots, k in kept:
            snapshots[k] = snapshots[k].with_perturbation(self.z[i])

    def set_schedule(self, rates: Sequence[float]) -> None:
        """Set the learning rate of the next step, for each row."""
        column = to_device(torch.tensor(rates, dtype=torch.float64), self.hparams.device)
        self.hparams[:, 0, HParam.LR].copy_(column)

    def perturb(self, first: Gradients, eps: Tensor | None = None) -> None:
        """Set `z = w + eps` by the first gradients. With a dual, eps `[rows, row_size]` is also written to `eps` if it
        is given."""
        self._perturb(self, first, eps)

    def _perturb_by_gradient(self, first: Gradients, eps: Tensor | None) -> None:
        assert self.w is not None  # set_variant() allocated it
        weights = [self.w] if self.variant.direction is Direction.ADAPTIVE_GRADIENT else []
        self.kernels.norm_(self.sumsq, first.tensors, weights, first.table, self.hparams)
        self.kernels.perturb_([self.z], self.w, first.tensors, first.table, self.hparams, self.sumsq, False)

    def _perturb_by_dual(self, first: Gradients, eps: Tensor | None) -> None:
        grads, table, mu, s = first.tensors, first.table, self.field("dual"), self.s
        assert self.w is not None and s is not None
        self.kernels.dual_norm_(self.sumsq, grads, mu, s, table, self.hparams)
        self.kernels.dual_perturb_([self.z], self.w, mu, grads, s, table, self.hparams, self.sumsq, eps=eps)

    def _perturb_by_direction(self, first: Gradients, eps: Tensor | None) -> None:
        """Perturb along the first gradient and further parts of the direction, and pull towards the anchor."""
        assert self.w is not None
        grads, table, variant = first.tensors, first.table, self.variant
        if variant.direction is Direction.GRADIENT_PLUS:
            grads = directions.sum_directions(self, first)
        weights = [self.w] if variant.direction is Direction.ADAPTIVE_GRADIENT else []
        self.kernels.norm_(self.sumsq, grads, weights, table, self.hparams)
        if variant.direction is Direction.GRADIENT_BY_DRIFT:
            grads = directions.scale_by_drift(self, first)
        self.kernels.perturb_([self.z], self.w, grads, table, self.hparams, self.sumsq, False)
        if variant.anchor_weight:
            self.z.lerp_(self.vectors["anchor"], variant.anchor_weight)

    def perturb_along_path(self) -> None:
        """Set `z = w + eps` along `k*e + drift*(w - w^t)` in step k, before any gradient. The field "path" is k*e."""
        assert self.w is not None  # set_variant() allocated it
        path = self.field("path")
        self._perturb_along([self.z], self.w, directions.add_drift(self, path))
        path.add_(self.vectors["direction_vector"])

    def _perturb_along(self, z: list[Tensor], w: Tensor, d: Tensor) -> None:
        """Set `z = w + eps` along rows d, `[rows, row_size]`, without a gradient."""
        self.kernels.norm_(self.sumsq, [d], [], self.layout.table, self.hparams)
        self.kernels.perturb_(z, w, [d], self.layout.table, self.hparams, self.sumsq, False)

    def update(self, grads: Gradients, first: Gradients | None) -> None:
        """Update `z`, and `w` if the steps have it."""
        g1 = None if self._prepare is None else self._prepare(self, grads, first)
        self.kernels.update_(
            [self.z], self.w, grads.tensors, grads.table, self.hparams, self.rule.name, self.state,
            steps=self.counts, g1=g1, sumsq_v=self.sumsq_v, write_master=self.w is not None, q=self.q, **self._shift,
        )  # fmt: skip
        if self.variant.has_step_offset:
            rate = self.hparams[:, :, HParam.LR].to(self.z.dtype)
            for weights in (self.z,) if self.w is None else (self.z, self.w):
                weights.addcmul_(self.vectors["step_offset"], rate, value=-1)

    def _restore_unused(self, grads: Gradients, first: Gradients | None) -> None:
        """Restore parameters that only the first pass used, which must not stay perturbed."""
        if first is not None and first.slots != grads.slots:
            assert self.w is not None
            self.kernels.restore_([self.z], self.w, first.table)

    def _prepare_update(self, grads: Gradients, first: Gradients | None) -> list[Tensor] | None:
        """Return the first gradients if the update reads them. Restore what only the first pass used, and compute what
        clipping and a surrogate gap need."""
        if self.variant.uses_path or self.variant.anchor_weight:
            if self.w is not None and len(grads.slots) < len(self.layout.segments):
                self.z.copy_(self.w)  # parameters that the pass did not use were perturbed too, and must not stay so
        else:
            self._restore_unused(grads, first)
        if self.variant.uses_last_gradient:
            torch._foreach_copy_(directions.views_like(self, grads, self.field("last")), grads.tensors)
        g1 = first.like(grads) if first is not None and self.variant.keeps_first else None
        if self.variant.surrogate and g1:
            self.kernels.inner_(self.inner, g1, grads.tensors, grads.table)
            set_gsam_coefficients_(self.hparams, self.inner)
        if self.sumsq_v is not None:
            self.kernels.update_norm_(
                self.sumsq_v, [self.z], self.w, grads.tensors, grads.table, self.hparams, g1=g1, q=self.q
            )
        return g1

    # --- the end of a round ---

    def optimizer_state(self) -> dict[str, Tensor]:
        """Return the state of the rule by name, each `[rows, ...]`, in new memory."""
        return {name: field.clone() for name, field in self.optimizer_fields.items()}

    def start_of(self, start: Tensor) -> Tensor:
        """Return the weights from which deltas are measured, in a round from the weights `start`."""
        has_begin = self.variant.constant or (self.copies and self.variant.has_start)
        return self.field("begin") if has_begin else start

    def results(self, start: Tensor, delta: Tensor | None = None) -> dict[str, Any]:
        """Return the vectors of `ClientResults` of a round from the weights `start`, in new memory. `delta` is the
        displacement of the rows from the start, if it is known."""
        results: dict[str, Any] = {name: self.field(name).clone() for name in self.variant.results}
        if self.variant.has_pilot:
            results["norms"] = self.norms.clone()
        if self.variant.has_optimizer_state:
            results["optimizer_state"] = self.optimizer_state()
        return {"delta": self.z - self.start_of(start) if delta is None else delta, **results}
