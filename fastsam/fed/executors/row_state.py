"""The arithmetic of the local update rule on rows of an arena: the kernels of a local step and their operands.

    perturb             norm_, perturb_ along the first gradient, or along a direction made of it by torch's operations;
                        dual_norm_, dual_perturb_ with a dual (FedSMOO)
    perturb_along_path  norm_, perturb_ along a direction without a gradient, before the only pass
    start_shifted       norm_, perturb_ once a round, for a constant perturbation
    update              inner_ for GSAM, update_norm_ with clipping, then update_ with the rule of SGD

`ClientTrainer` runs them on one row, `vmap` and `graph` on several.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property

import torch
from torch import Tensor

from fastsam import ops
from fastsam.arena import Arena
from fastsam.fed.common.transfer import to_device
from fastsam.fed.executors.gradient_passes import Gradients
from fastsam.fed.executors.task import LocalOptions, Setup
from fastsam.fed.update.local_update import NU, Direction, LocalUpdate, Snapshot
from fastsam.fed.update.pilot import Pilot
from fastsam.fed.update.variant import StepVariant
from fastsam.step import perturbation, set_gsam_coefficients_
from fastsam_kernels.hparams import NUM_HPARAMS, HParam
from fastsam_kernels.rules import sgd

_MIN_NORM = 1e-12  # norm of a drift that is divided by: a weight that has not moved is not perturbed


class RowState:
    """The state of `rows` rows, each with its own constants of the local update rule.

    Attributes:
        hparams: hyperparameters, float64 `[rows, 1, NUM_HPARAMS]`.
        losses: sums of the losses of each row, float64 `[rows]`.
        sumsq_v: squared norms of the update directions, float64 `[rows]`, or None if the run does not clip.
    """

    def __init__(self, setup: Setup, rows: int) -> None:
        self.layout, self.options, self.dtype, self.device = setup.layout, setup.options, setup.dtype, setup.device
        self.kernels = ops.bind(setup.backend, setup.device, setup.dtype)
        self.arena = Arena(setup.layout, rows, setup.device)
        self.hparams = torch.zeros(rows, 1, NUM_HPARAMS, dtype=torch.float64, device=setup.device)
        self._common = _common(setup.options)
        self.losses = torch.zeros(rows, dtype=torch.float64, device=setup.device)
        self.sumsq = torch.zeros(rows, dtype=torch.float64, device=setup.device)
        self.sumsq_v = torch.zeros_like(self.sumsq) if setup.options.clip_norm is not None else None
        self.inner = torch.zeros(rows, 2, dtype=torch.float64, device=setup.device)

    def field(self, name: str) -> Tensor:
        return self.arena.field(name, self.dtype)

    def numbers(self, update: LocalUpdate, lr: float) -> tuple[float, ...]:
        """Return a row of `hparams`."""
        values = self._common.copy()
        radius = perturbation(update.direction, update.rho, update.eta, NU)
        for column, value in (*radius, *update.constants.mix.columns()):
            values[column] = value
        values[HParam.PENALTY] = update.penalty
        values[HParam.LR] = lr
        values[HParam.PROX_MU] = update.proximal_coefficient
        return tuple(values)


def _common(options: LocalOptions) -> list[float]:
    """Return the hyperparameters that all rows of a run share."""
    values = [0.0] * NUM_HPARAMS
    values[HParam.DECAY] = options.weight_decay
    values[HParam.CLIP] = options.clip_norm or 0.0
    values[HParam.CLIP_INCLUDES_PROX] = float(options.clip_scope == "full")
    values[sgd.MOMENTUM] = options.momentum
    return values


class RowSlice:
    """Some neighbouring rows of a `RowState` and their steps, all of one variant, which `set_variant` sets.

    Attributes:
        z: `[rows, row_size]`, the weights that autograd sees.
        w: the unperturbed weights, for steps that perturb by a gradient.
        q, shift, s: further operands of the kernels, `[rows, row_size]`. The rows of s may be one.
        vectors: further vectors by name (`StepVariant.vectors`).
    """

    def __init__(self, rows: RowState, part: slice) -> None:
        self.rows, self.part = rows, part
        self.kernels, self.layout = rows.kernels, rows.layout
        self.z, self.hparams, self.losses = self.field("z"), rows.hparams[part], rows.losses[part]
        self.sumsq, self.inner = rows.sumsq[part], rows.inner[part]
        self.momentum = self.field("momentum") if rows.options.momentum else None
        self.sumsq_v = None if rows.sumsq_v is None else rows.sumsq_v[part]
        self.s: Tensor | None = None
        self.vectors: dict[str, Tensor] = {}
        self._select(LocalUpdate().constants.variant)

    def field(self, name: str) -> Tensor:
        return self.rows.field(name)[self.part]

    @cached_property
    def leaves(self) -> list[Tensor]:
        """One view `[rows, *shape]` per parameter, for autograd."""
        return [view.detach().requires_grad_() for view in self.layout.views(self.z)]

    def set_variant(self, variant: StepVariant) -> None:
        """Take the fields that steps of `variant` work on, if the last steps were of another one. An owner may put
        another tensor than the field in `q`."""
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
        self._starts = [field for field in starts if field is not None]
        zeros = [self.momentum, *map(self.field, variant.memory)]
        self._zeros = [field for field in zeros if field is not None]
        self._perturb, self._prepare = self._perturbation(), self._preparation()  # not bound: each would be a cycle

    def _perturbation(self) -> Callable[[RowSlice, Gradients, Tensor | None], None]:
        """Return the method that perturbs by a first gradient."""
        variant = self.variant
        if variant.direction is Direction.GRADIENT_MINUS_DUAL:
            return RowSlice._perturb_by_dual
        is_plain = variant.direction in (Direction.GRADIENT, Direction.ADAPTIVE_GRADIENT)
        if is_plain and not (variant.has_rho_scale or variant.anchor_weight):
            return RowSlice._perturb_by_gradient
        return RowSlice._perturb_by_direction

    def _preparation(self) -> Callable[[RowSlice, Gradients, Gradients | None], list[Tensor] | None] | None:
        """Return the method that prepares an update, or None if nothing has to be prepared."""
        variant = self.variant
        reads_first = variant.keeps_first or variant.surrogate or variant.uses_last_gradient
        if self.sumsq_v is not None or reads_first or variant.uses_path or variant.anchor_weight:
            return RowSlice._prepare_update
        return RowSlice._restore_unused if variant.two_passes else None

    @property
    def folds_shift(self) -> bool:
        """True if a constant perturbation p is folded into q as `-coefficient*p`, for the terms that belong to `w`."""
        options = self.rows.options
        inside = self.variant.has_phi or (options.clip_norm is None and options.weight_decay > 0)
        return inside and (options.clip_scope == "full" or options.clip_norm is None)

    @property
    def shift(self) -> Tensor | None:
        """p, where a constant perturbation cannot be folded into q: clipping does not scale the decay."""
        options = self.rows.options
        outside = options.weight_decay > 0 or (options.clip_scope != "full" and self.variant.has_phi)
        return self.field("p") if self.variant.constant and options.clip_norm is not None and outside else None

    # --- the beginning of a round ---

    def begin(self, start: Tensor) -> None:
        """Write the weights of the start (`[row_size]`, or `[rows, row_size]`) to every row, and clear the momentum."""
        for field in self._starts:
            field.copy_(start)
        for field in self._zeros:
            field.zero_()

    def start_shifted(self, e: Tensor) -> None:
        """Start at `w^t + p` with `p = rho*e/(||e|| + nu)`, for e `[row_size]` or `[rows, row_size]`."""
        p, begin, rows = self.field("p"), self.field("begin"), e.expand_as(self.z)
        self._perturb_along(
            [begin], self.z, self.field("direction").copy_(rows) if self.variant.has_rho_scale else rows
        )
        torch.sub(begin, self.z, out=p)
        self.z.copy_(begin)
        if self.folds_shift:
            phi, decay = self.hparams[:, :, HParam.PROX_MU], self.hparams[:, :, HParam.DECAY]
            inside = phi if self.sumsq_v is not None else phi + decay
            offset, correction = self.field("gradient_offset"), p * -inside.to(p.dtype)
            self.q = offset.copy_(correction if not self.variant.has_q or self.q is None else correction.add_(self.q))

    def set_radius(self, pilot: Pilot, norms: Tensor, gradients: Tensor) -> None:
        """Set the radii that the pilot computes from the mean norms, `[rows]`, and gradients, `[rows, row_size]`, of
        the rows."""
        self.hparams[:, 0, HParam.RHO].copy_(pilot.radii(norms, gradients))

    def snapshot(self, row: int) -> Snapshot:
        """Return a copy of a row before a step, for measures along the path."""
        if not self.variant.constant:
            return Snapshot(self.z[row].clone())
        p = self.field("p")[row].clone()
        return Snapshot(self.z[row] - p, p)

    # --- a step ---

    def set_schedule(self, numbers: Sequence[tuple[float, float]]) -> None:
        """Set the learning rate and the radius of the next step, for each row. A radius that a pilot found stays."""
        rates, radii = to_device(torch.tensor(numbers, dtype=torch.float64), self.hparams.device).unbind(1)
        self.hparams[:, 0, HParam.LR].copy_(rates)
        if not self.variant.has_pilot:
            self.hparams[:, 0, HParam.RHO].copy_(radii)

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
            grads = self._sum_directions(first)
        weights = [self.w] if variant.direction is Direction.ADAPTIVE_GRADIENT else []
        if variant.has_rho_scale:
            grads = self._times(grads, first, self.vectors["rho_scale"].sign())
        self.kernels.norm_(self.sumsq, grads, weights, table, self.hparams)
        if variant.direction is Direction.GRADIENT_BY_DRIFT:
            grads = self._by_drift(first)
        if variant.has_rho_scale:
            grads = self._times(grads, first, self.vectors["rho_scale"])
        self.kernels.perturb_([self.z], self.w, grads, table, self.hparams, self.sumsq, False)
        if variant.anchor_weight:
            self.z.lerp_(self.vectors["anchor"], variant.anchor_weight)

    def perturb_along_path(self) -> None:
        """Set `z = w + eps` along `k*e + drift*(w - w^t)` in step k, before any gradient. The field "path" is k*e."""
        assert self.w is not None  # set_variant() allocated it
        path = self.field("path")
        self._perturb_along([self.z], self.w, self._add_drift(path))
        path.add_(self.vectors["direction_vector"])

    def _perturb_along(self, z: list[Tensor], w: Tensor, d: Tensor) -> None:
        """Set `z = w + eps` along rows d, `[rows, row_size]`, without a gradient. `d` is written if the radius is
        scaled."""
        table, scale = self.layout.table, self.vectors["rho_scale"] if self.variant.has_rho_scale else None
        if scale is not None:
            d.mul_(scale.sign())
        self.kernels.norm_(self.sumsq, [d], [], table, self.hparams)
        if scale is not None:
            d.mul_(scale)
        self.kernels.perturb_(z, w, [d], table, self.hparams, self.sumsq, False)

    def _add_drift(self, e: Tensor) -> Tensor:
        """Return `e + drift*(w - w^t)`, in the field "direction"."""
        d = self.field("direction")
        if not self.variant.drift_weight:
            return d.copy_(e)
        assert self.w is not None
        torch.sub(self.w, self.field("origin"), out=d)
        return d.mul_(self.variant.drift_weight).add_(e)

    def _sum_directions(self, first: Gradients) -> list[Tensor]:
        """Return the first gradients plus the other parts of the direction, by parameter."""
        d = self._add_drift(self.vectors["direction_vector"])
        if self.variant.uses_last_gradient:
            d.add_(self.field("last"))
        views = self._like(first, d)
        torch._foreach_add_(views, first.tensors)
        return views

    def _by_drift(self, first: Gradients) -> list[Tensor]:
        """Return the first gradients times `|w - w^t|`, of each parameter over its norms along the first dimension."""
        assert self.w is not None
        d = torch.sub(self.w, self.field("origin"), out=self.field("direction")).abs_()
        for view in self.layout.views(d):  # [rows, *shape]
            far = view if view.dim() > 1 else view.unsqueeze(1)
            far.div_(torch.linalg.vector_norm(far, dim=1, keepdim=True).clamp_(min=_MIN_NORM))
        views = self._like(first, d)
        torch._foreach_mul_(views, first.tensors)
        return views

    def _times(self, d: Sequence[Tensor], first: Gradients, factors: Tensor) -> list[Tensor]:
        """Return a direction by parameter, like the first gradients, times a row of factors, in the field
        "direction"."""
        views = self._like(first, self.field("direction"))
        for out, part, factor in zip(views, d, self._like(first, factors), strict=True):
            torch.mul(part, factor, out=out)
        return views

    def _like(self, grads: Gradients, field: Tensor) -> list[Tensor]:
        """Return views of a field, one for each of the gradients and shaped like it. A single row's views have no
        dimension for the rows."""
        views = self.layout.views(field)
        return [views[i].view_as(g) for i, g in zip(grads.slots, grads.tensors, strict=True)]

    def update(self, grads: Gradients, first: Gradients | None) -> None:
        """Update `z`, and `w` if the steps have it."""
        g1 = None if self._prepare is None else self._prepare(self, grads, first)
        self.kernels.update_(
            [self.z], self.w, grads.tensors, grads.table, self.hparams, "sgd", [self.momentum],
            g1=g1, sumsq_v=self.sumsq_v, write_master=self.w is not None, q=self.q, **self._shift,
        )  # fmt: skip

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
            torch._foreach_copy_(self._like(grads, self.field("last")), grads.tensors)
        g1 = first.like(grads) if first is not None and self.variant.keeps_first else None
        if self.variant.surrogate and g1:
            self.kernels.inner_(self.inner, g1, grads.tensors, grads.table)
            set_gsam_coefficients_(self.hparams, self.inner)
        if self.sumsq_v is not None:
            self.kernels.update_norm_(
                self.sumsq_v, [self.z], self.w, grads.tensors, grads.table, self.hparams, g1=g1, q=self.q
            )
        return g1
