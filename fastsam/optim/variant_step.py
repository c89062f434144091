"""The step of a variant: its parts, the combination of its gradients, and the vector that it keeps between steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from fastsam.optim.bucket import G1, GRADIENT, NEXT_STATE, VARIANT_STATE, Bucket, BucketGrads
from fastsam.optim.hparams import HParamTensor, LossScales
from fastsam.optim.selection import Selection
from fastsam.optim.sharded import all_reduced, to_local
from fastsam.optim.update import Group, State, UpdateInputs, rule_of
from fastsam.optim.variants.sam import SAM, OnePassDirection, VariantState
from fastsam_kernels.constants import CLIP_EPS
from fastsam_kernels.hparams import HParam

# By update rule: the field of its state that is a momentum.
MOMENTA = {"sgd": "momentum_buffer", "rmsprop": "momentum_buffer", "adam": "exp_avg", "lion": "exp_avg"}


class VariantStep:
    """A step of a variant: directions of the perturbation, and gradients of the update.

    Methods do not change weights or the optimizer's state; changes are in `UpdateInputs.calls_after`.

    Attributes:
        one_pass: the weights are perturbed between steps, so that a step has one pass.
        perturbs_every_step: there is no step without a perturbation, so steps are not counted.
        needs_g1: the second pass reads the first gradients.
        combines: the update reads more than the last gradient, or keeps something for the next step.
        reads_both: the update reads both gradients, so clipping the second one by hand would be wrong.
        needs_norm: the norm comes before the perturbation: it is not the L2 norm of the gradient, or rho depends on it.
        has_unperturbed_groups: the variant leaves some parameter groups where they are.
        is_plain_sam: a step is the norm, the perturbation and the update of SAM, and nothing else.
        unit: scale of a GradScaler in the first step, in units of which a direction's vector is kept from then on.
    """

    unit: Tensor | None = None

    def __init__(self, variant: SAM) -> None:
        self.coefficients, self.unperturbed_coefficients = variant.coefficients, variant.unperturbed_coefficients
        self.state, self.choose, self.base_state = variant.state, variant.direction, variant.base_state
        self.one_pass = variant.one_pass_direction is not OnePassDirection.NONE
        self.keeps_gradient = variant.one_pass_direction is OnePassDirection.GRADIENT
        updates_state = variant.state is VariantState.ORTHOGONAL
        if updates_state and self.coefficients.needs_g1:
            raise ValueError(
                f"{type(variant).__name__} keeps a part of g2, so its coefficients must have only g2, got "
                f"{self.coefficients}"
            )
        looks_ahead = bool(self.unperturbed_coefficients.looksam_alpha)
        self.perturbs_every_step = not self.one_pass and variant.perturbs_every_step
        self.needs_g1 = self.coefficients.needs_g1 or updates_state
        self._changes_gradient = self.coefficients.needs_g1 or self.coefficients.g2 != 1
        keeps_vector = self.state is not VariantState.NONE
        self.combines = self._changes_gradient or keeps_vector or looks_ahead
        self.reads_both = self.coefficients.needs_g1 or looks_ahead
        self.needs_norm = variant.rho_fn is not None or variant.norm_degree != 2
        self.has_unperturbed_groups = type(variant).perturbs_group is not SAM.perturbs_group
        has_more = self.combines or self.needs_norm or self.has_unperturbed_groups or variant.has_direction
        self.is_plain_sam = self.perturbs_every_step and not has_more

    def directions(self, calls: Sequence[BucketGrads], scale: Tensor | None) -> list[BucketGrads]:
        """Return `calls` with the vectors of the perturbation in place of the first gradients, whose loss scale is
        `scale` (None if it is not known)."""
        factor = None if self.unit is None or scale is None else self.unit / scale
        return [(b, part, b.direction_(part, grads, self.choose, factor, self.base_state)) for b, part, grads in calls]

    def add_state(self, bucket: Bucket) -> None:
        """Add the vector that the variant keeps, which is a part of the state from the first step on."""
        if self.state is not VariantState.NONE or self.keeps_gradient:
            dtype = bucket.compute if self.state is VariantState.DIRECTION else bucket.dtype
            bucket.arena.field(VARIANT_STATE, dtype)

    def next_directions(
        self, scalars: HParamTensor, buckets: Sequence[Bucket], state: State, has_all_grads: bool
    ) -> list[BucketGrads]:
        """Return the vectors along which a variant of one pass perturbs between steps: gradients that
        `keep_gradients` kept, or the momentum in the base optimizer's `state`.

        `has_all_grads` is True if every parameter had a gradient in the last step.
        """
        name = None if self.keeps_gradient or scalars.rule is None else MOMENTA[scalars.rule.name]
        has_vector = [name is None or name in spec.fields for spec in scalars.specs]
        is_whole, result = has_all_grads and all(has_vector), []
        for bucket in buckets:
            part = bucket.whole
            if not is_whole:
                pairs = zip(bucket.params, bucket.groups, strict=True)
                moves = [p.requires_grad if name is None else has_vector[group] and p in state for p, group in pairs]
                part = bucket.select(tuple(i for i in part.slots if moves[i]))
            if name is None:
                vector = bucket.arena.field(VARIANT_STATE, bucket.dtype)
            else:
                vector = bucket.to_param_dtype(bucket.field(name))
            result.append((bucket, part, part.field_views(vector)))
        return result

    def keep_gradients(self, calls: Sequence[BucketGrads], found_inf: Tensor | None) -> list[partial[Any]]:
        """Return the calls that keep the gradients of a step for the next perturbation, and zeros for parameters
        without one; nothing is kept if `found_inf` is not 0."""
        if not self.keeps_gradient or not any(grads for _, _, grads in calls):
            return []
        calls_after = []
        for bucket, part, grads in calls:
            state = bucket.arena.field(VARIANT_STATE, bucket.dtype)
            if found_inf is None and part is bucket.whole:
                calls_after.append(c_call(torch._foreach_copy_, part.field_views(state), list(grads)))
                continue
            field = bucket.fill_(bucket.arena.field(GRADIENT, bucket.dtype), part, grads)
            if found_inf is not None:
                torch.where(found_inf == 0, field, state, out=field)
            calls_after.append(c_call(state.copy_, field))
        return calls_after

    def combine(
        self,
        scalars: HParamTensor,
        calls: Sequence[BucketGrads],
        sumsq: Tensor,
        scales: LossScales,
        found_inf: Tensor | None,
    ) -> UpdateInputs:
        """Return the inputs of a fused update in a step that perturbed. `sumsq` is the squared norm of g1, float64
        `[1]`."""
        calls_after = self._state_update_calls(calls, sumsq, found_inf)
        if self._changes_gradient:
            scalars.set_coefficients(_inner(calls) if self.coefficients.gsam_alpha else None, scales)
        if not self.coefficients.needs_g1:
            return with_norm(scalars, UpdateInputs(calls, None, calls_after, found_inf, scales.g2))
        found_inf = or_nonfinite(found_inf, sumsq)
        inputs = with_norm(
            scalars, UpdateInputs(calls, G1, calls_after, found_inf, scales.g2), scalars.combined_hparams
        )
        if not self.coefficients.wsam_weight:
            return inputs
        for bucket, selection, grads in calls:
            if selection.slots:
                calls_after += _sharpness_calls(bucket, selection, grads, scalars.correction, inputs)
        return inputs._replace(
            calls=[(bucket, part, bucket.g1_views(part)) for bucket, part, _ in calls], g1_field=None
        )

    def combine_single(
        self, scalars: HParamTensor, calls: Sequence[BucketGrads], scales: LossScales, found_inf: Tensor | None
    ) -> UpdateInputs:
        """Return the inputs of a fused update in a step that did not perturb."""
        scalars.set_single_grad_coefficients()
        inputs = UpdateInputs(calls, None, [], found_inf, scales.g2)
        if self.unperturbed_coefficients.looksam_alpha:
            scalars.set_looksam_coefficient(self.unperturbed_coefficients.looksam_alpha * _ratio(calls), scales.g2)
            inputs = inputs._replace(g1_field=VARIANT_STATE)
        return with_norm(scalars, inputs)

    @torch.no_grad()
    def combine_in_place(
        self,
        scalars: HParamTensor,
        calls: Sequence[BucketGrads],
        sumsq: Tensor,
        scales: LossScales,
        found_inf: Tensor | None,
        is_perturbed: bool,
    ) -> UpdateInputs:
        """Write the result of `combine` into the gradients, for a base optimizer that makes its own step."""
        scale = scales.relative
        if not is_perturbed:
            inputs = self.combine_single(scalars, calls, scale, found_inf)
        elif self.coefficients.wsam_weight:
            inputs = self._split_sharpness(calls, sumsq, scale, found_inf)
        else:
            inputs = self.combine(scalars, calls, sumsq, scale, found_inf)
        uses_coefficients = inputs.g1_field is not None or (is_perturbed and self.coefficients.g2 != 1)
        for bucket, selection, _ in calls if uses_coefficients else ():
            a, b = (bucket.hparams[0, 0, column].to(bucket.dtype) for column in (HParam.G2_COEF, HParam.G1_COEF))
            last = _writable_grads(bucket, selection)
            for g2 in last:
                g2.mul_(a)
            if inputs.g1_field is not None:
                for g2, g1 in zip(last, inputs.g1(bucket, selection) or (), strict=True):
                    g2.add_(g1 * b)
        return inputs

    def _split_sharpness(
        self, calls: Sequence[BucketGrads], sumsq: Tensor, scales: LossScales, found_inf: Tensor | None
    ) -> UpdateInputs:
        """Give the base optimizer the first gradients, and keep `g2 - g1` for after its step."""
        for bucket, selection, _ in calls:
            for g2, g1 in zip(_writable_grads(bucket, selection), bucket.g1_views(selection), strict=True):
                one = g1 if scales.g1 is None else g1 / scales.g1.to(g1.dtype)
                difference = g2 - one
                g2.copy_(one)
                g1.copy_(difference)
        calls_after = self._state_update_calls(calls, sumsq, found_inf)
        return UpdateInputs(calls, None, calls_after, or_nonfinite(found_inf, sumsq))

    @torch.no_grad()
    def apply_sharpness(
        self, groups: Sequence[dict[str, Any]], calls: Sequence[BucketGrads], scale: Tensor | None
    ) -> None:
        """Apply the kept sharpness (`_split_sharpness`), whose loss scale is `scale`, after the base optimizer's own
        step."""
        for bucket, selection, _ in calls:
            for i, difference in zip(selection.slots, bucket.g1_views(selection), strict=True):
                group = groups[bucket.groups[i]]
                factor = group["lr"] * self.coefficients.wsam_weight * (-1 if group.get("maximize") else 1)
                step_size = factor if scale is None else factor / scale.to(difference.dtype)
                to_local(bucket.params[i]).sub_(difference * step_size)

    def _state_update_calls(
        self, calls: Sequence[BucketGrads], sumsq: Tensor, found_inf: Tensor | None
    ) -> list[partial[Any]]:
        """Return the calls that update the kept vector. It stays if a gradient is not finite."""
        if self.state is VariantState.ORTHOGONAL:
            return self._orthogonal(calls, sumsq, found_inf)
        if self.state is VariantState.NONE:
            return []
        fine = or_nonfinite(found_inf, sumsq) == 0
        calls_after: list[partial[Any]] = []
        for bucket, _, _ in calls:
            state, next_state = bucket.field(VARIANT_STATE), bucket.field(NEXT_STATE)
            torch.where(fine, next_state, state, out=next_state)
            calls_after.append(c_call(state.copy_, next_state))
        return calls_after

    def unit_calls(self, scale: Tensor | None) -> list[partial[Any]]:
        """Return the calls that set the unit after the first step: the loss scale of its first gradients."""
        if self.state is not VariantState.DIRECTION or self.unit is not None:
            return []
        unit = torch.ones(1, dtype=torch.float32, device="cpu") if scale is None else scale.clone()
        return [partial(setattr, self, "unit", unit)]

    def _orthogonal(self, calls: Sequence[BucketGrads], sumsq: Tensor, found_inf: Tensor | None) -> list[partial[Any]]:
        """Return the calls that keep the part of g2 that is orthogonal to g1."""
        inner = all_reduced(
            calls,
            sumsq.new_zeros(1, 2),
            lambda b, part, grads, total: b.kernels.inner_(total, grads, b.g1_views(part), part.table, True),
        )
        projection = inner[0, 0] / (inner[0, 1] + torch.finfo(torch.float64).tiny)
        fine = (or_nonfinite(found_inf, sumsq) == 0) & projection.isfinite()
        calls_after = []
        for bucket, selection, grads in calls:
            g1, state = bucket.arena.field(G1, bucket.dtype), bucket.arena.field(VARIANT_STATE, bucket.dtype)
            g1.mul_(-projection)
            if grads:
                torch._foreach_add_(bucket.g1_views(selection), list(grads))
            torch.where(fine, g1, state, out=g1)
            calls_after.append(c_call(state.copy_, g1))
        return calls_after


def c_call(function: Callable[..., Any], *operands: Any) -> partial[Any]:
    """Return `function(*operands)`, a function in C, as a call of an update, which returns nothing and has no line of
    Python."""
    if torch.compiler.is_compiling():
        return partial(function, *operands)
    return partial(deque[Any](maxlen=0).extend, map(function, *((operand,) for operand in operands)))


def _inner(calls: Sequence[BucketGrads]) -> Tensor:
    """Return `<g1, g2>` and `||g2||^2`, float64 `[1, 2]`."""
    return all_reduced(
        calls,
        _zeros(calls, 1, 2),
        lambda b, part, grads, total: b.kernels.inner_(total, b.g1_views(part), grads, part.table, True),
    )


def _zeros(calls: Sequence[BucketGrads], *shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.float64, device=calls[0][0].device if calls else "cpu")


def update_norm(inputs: UpdateInputs, hparams: Tensor | None = None) -> Tensor:
    """Return the squared norm of the combined gradient, float64 `[1]`, with the coefficients in `hparams` (None: the
    coefficients of the update)."""

    def add(bucket: Bucket, part: Selection, grads: Sequence[Tensor], total: Tensor) -> None:
        part.load()  # the kernel reads weights, if only to multiply them with 0
        options = {"g1": inputs.g1(bucket, part), "grad_scale": inputs.grad_scale, "accumulate": True}
        numbers = bucket.hparams if hparams is None else hparams
        bucket.kernels.update_norm_(total, part.tensors, None, grads, part.table, numbers, **options)

    return all_reduced(inputs.calls, _zeros(inputs.calls, 1), add)


def largest(calls: Sequence[BucketGrads], like: Tensor) -> Tensor:
    """Return the largest absolute value in the vectors of `calls`, 0 without any, NaN if one is NaN."""
    tensors = [g for _, _, grads in calls for g in grads if g.numel()]
    if not tensors:
        return torch.zeros_like(like)
    return torch.stack(torch._foreach_norm(tensors, torch.inf)).amax().to(like.dtype).view(1)


def _ratio(calls: Sequence[BucketGrads]) -> Tensor:
    """Return `||g||/||m||` of these gradients and the kept vector, float64 `[1]`; 0 if it is not defined.

    The coefficient of gradients is 1 or -1 at this time.
    """
    parts = [(b, part, part.field_views(b.arena.field(VARIANT_STATE, b.dtype))) for b, part, _ in calls]
    g, m = update_norm(UpdateInputs(calls)), update_norm(UpdateInputs(parts))
    return torch.where((m > 0) & g.isfinite(), (g / m).sqrt(), 0.0)


def or_nonfinite(found_inf: Tensor | None, sumsq: Tensor) -> Tensor:
    """Return float32 `[1]`, which is not 0 if `found_inf` is not 0, or if this sum of squares is not finite."""
    is_nonfinite = (~sumsq.isfinite()).to(torch.float32)
    return is_nonfinite if found_inf is None else torch.maximum(is_nonfinite, found_inf.reshape(1))


def _writable_grads(bucket: Bucket, selection: Selection) -> list[Tensor]:
    """Return the gradients that a base optimizer will read."""
    return [to_local(g) for i in selection.slots if (g := bucket.params[i].grad) is not None]


def with_norm(scalars: HParamTensor, inputs: UpdateInputs, hparams: Tensor | None = None) -> UpdateInputs:
    """Return the inputs with the squared norm of the combined gradient (`update_norm`), if a fused update clips it."""
    if scalars.max_grad_norm is None or scalars.rule is None or not inputs.calls:
        return inputs
    return inputs._replace(sumsq=update_norm(inputs, hparams))


@torch.no_grad()
def clip_in_memory(calls: Sequence[BucketGrads], limit: float, sharpness: float, scale: Tensor | None) -> None:
    """Clip the combined gradient of a base optimizer that makes its own step to the norm `limit`.

    `sharpness` is the coefficient of `g2 - g1`, which is where the first gradients were, and `scale` its loss scale.
    """
    parts = [(bucket, part, _writable_grads(bucket, part)) for bucket, part, _ in calls]

    def add(bucket: Bucket, part: Selection, grads: Sequence[Tensor], total: Tensor) -> None:
        combined_grads = [g.double() for g in grads]
        if sharpness:
            differences = [sharpness * d.double() / (1.0 if scale is None else scale) for d in bucket.g1_views(part)]
            combined_grads = [g + d for g, d in zip(combined_grads, differences, strict=True)]
        for g in combined_grads:
            total.add_(g.square().sum())

    clipping = (limit / (all_reduced(parts, _zeros(calls, 1), add).sqrt() + CLIP_EPS)).clamp(max=1.0)
    for bucket, part, grads in parts:
        for g in (*grads, *(bucket.g1_views(part) if sharpness else ())):
            g.mul_(clipping.to(g.dtype))


def _sharpness_calls(
    bucket: Bucket, part: Selection, grads: Sequence[Tensor], hparams: Tensor, inputs: UpdateInputs
) -> list[partial[Any]]:
    """Return the calls that make `w -= lr*sharpness*(g2 - g1)` after the update: the update of an SGD with these
    numbers in `hparams`."""
    backup = bucket.backup.weights if bucket.backup.is_master else None
    operands = part.tensors, backup, grads, part.table, hparams, "sgd", [None]
    calls = inputs._replace(g1_field=G1).op_calls(bucket, part, operands, steps=None, init_state=False)
    return [*calls, partial(part.store)] if part.indirect else calls


def check_base(variant: SAM, base: Optimizer, groups: Sequence[Group]) -> None:
    """Raise ValueError for a base optimizer without a learning rate or a state that the variant needs."""
    rule, name = rule_of(base), type(variant).__name__
    if variant.coefficients.wsam_weight and any("lr" not in group for group in groups):
        raise ValueError(
            f"{name} needs a base optimizer with a learning rate, which {type(base).__name__} has not; take "
            "decouple=False, or another base"
        )
    entry = variant.base_state
    if entry is not None and (rule is None or not all(entry in rule.fields(group) for group in groups)):
        raise ValueError(
            f"{name} reads {entry} in the state of its base optimizer, which has to be torch.optim.Adam or AdamW "
            f"(without amsgrad); got {type(base).__name__}"
        )
    if variant.one_pass_direction is not OnePassDirection.MOMENTUM:
        return
    if rule is None or rule.name not in MOMENTA:
        raise ValueError(
            f"{name} perturbs against the momentum of its base optimizer, which has to be torch.optim.SGD or RMSprop "
            f"with a momentum, Adam or AdamW (without amsgrad), or fastsam.Lion; got {type(base).__name__}"
        )
    for number, group in enumerate(groups):
        if MOMENTA[rule.name] not in rule.fields(group):
            raise ValueError(
                f"{name} perturbs against the momentum of its base optimizer, and parameter group {number} has none; "
                f"give one: momentum=0.9"
            )
