"""The combination of a step's gradients that a variant uses for the update, and the vector that it keeps between
steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fastsam.optim.bucket import FIRST, MEMORY, NEXT, Bucket, Call
from fastsam.optim.rules import UpdateInputs, op_calls
from fastsam.optim.scalars import Scalars, Scales
from fastsam.optim.selection import Selection
from fastsam.optim.sharded import local, summed
from fastsam.optim.variants.sam import SAM, Memory
from fastsam_kernels.columns import HParam
from fastsam_kernels.conventions import CLIP_EPS


class Mixing:
    """The gradients of a variant. Methods do not change weights or the optimizer's state; changes are in
    `UpdateInputs.after`."""

    def __init__(self, variant: SAM) -> None:
        self.mix, self.between = variant.mix, variant.between
        self.memory, self.choose = variant.memory, variant.direction
        learns = variant.memory is Memory.ORTHOGONAL
        if learns and self.mix.keeps_first:
            raise ValueError(
                f"{type(variant).__name__} keeps a part of g2, so its mix must be of g2 alone, got {self.mix}"
            )
        # The first gradients have to be there in the second pass.
        self.keeps_first = self.mix.keeps_first or learns
        # The update sees something else than the last gradient.
        self.weighs = self.mix.keeps_first or self.mix.a != 1
        # A GradScaler's scale in the first step: the unit of a direction's memory from then on.
        self.unit: Tensor | None = None

    def directed(self, calls: Sequence[Call], scale: Tensor | None) -> list[Call]:
        """Return `calls` with the vectors to perturb along in place of the gradients. scale: of a known GradScaler."""
        factor = None if self.unit is None or scale is None else self.unit / scale
        return [(b, part, b.direction_(part, grads, self.choose, factor)) for b, part, grads in calls]

    def read(
        self, scalars: Scalars, calls: Sequence[Call], sumsq: Tensor, scales: Scales, found_inf: Tensor | None
    ) -> UpdateInputs:
        """For a fused update in a step that perturbed. sumsq: float64 `[1]`, squared norm of the first gradients."""
        after = self._lesson(calls, sumsq, found_inf)
        if self.weighs:
            scalars.weigh_(_inner(calls) if self.mix.surrogate_gap else None, scales)
        if not self.mix.keeps_first:
            return with_norm(scalars, UpdateInputs(calls, None, after, found_inf, scales.second))
        found_inf = _or_nonfinite(found_inf, sumsq)
        inputs = with_norm(scalars, UpdateInputs(calls, FIRST, after, found_inf, scales.second), scalars.combined)
        if not self.mix.sharpness:
            return inputs
        for bucket, selection, grads in calls:
            if selection.slots:
                after += _corrected(bucket, selection, grads, scalars.correction, inputs)
        return inputs._replace(calls=[(bucket, part, bucket.first(part)) for bucket, part, _ in calls], g1_field=None)

    def read_alone(
        self, scalars: Scalars, calls: Sequence[Call], scales: Scales, found_inf: Tensor | None
    ) -> UpdateInputs:
        """For a fused update in a step that did not perturb."""
        scalars.alone_()
        inputs = UpdateInputs(calls, None, [], found_inf, scales.second)
        if self.between.reuse:
            scalars.reuse_(self.between.reuse * _ratio(calls), scales.second)
            inputs = inputs._replace(g1_field=MEMORY)
        return with_norm(scalars, inputs)

    @torch.no_grad()
    def change_(
        self,
        scalars: Scalars,
        calls: Sequence[Call],
        sumsq: Tensor,
        scales: Scales,
        found_inf: Tensor | None,
        perturbed: bool,
    ) -> UpdateInputs:
        """For a base optimizer that makes its own step: its gradients become what `read` would have made of them."""
        here = scales.in_memory
        if not perturbed:
            reading = self.read_alone(scalars, calls, here, found_inf)
        elif self.mix.sharpness:
            reading = self._parted(calls, sumsq, here, found_inf)
        else:
            reading = self.read(scalars, calls, sumsq, here, found_inf)
        weighed = reading.g1_field is not None or (perturbed and self.mix.a != 1)
        for bucket, selection, _ in calls if weighed else ():
            a, b = (bucket.hparams[0, 0, column].to(bucket.dtype) for column in (HParam.A, HParam.B))
            last = _written(bucket, selection)
            for g2 in last:
                g2.mul_(a)
            if reading.g1_field is not None:
                for g2, g1 in zip(last, reading.g1(bucket, selection) or (), strict=True):
                    g2.add_(g1 * b)
        return reading

    def _parted(self, calls: Sequence[Call], sumsq: Tensor, here: Scales, found_inf: Tensor | None) -> UpdateInputs:
        """A decoupled sharpness: the base optimizer gets the first gradients, and `g2 - g1` is kept for after its
        step."""
        for bucket, selection, _ in calls:
            for g2, g1 in zip(_written(bucket, selection), bucket.first(selection), strict=True):
                one = g1 if here.first is None else g1 / here.first.to(g1.dtype)
                difference = g2 - one
                g2.copy_(one)
                g1.copy_(difference)
        return UpdateInputs(calls, None, self._lesson(calls, sumsq, found_inf), _or_nonfinite(found_inf, sumsq))

    @torch.no_grad()
    def correct_(self, groups: Sequence[dict[str, Any]], calls: Sequence[Call], scale: Tensor | None) -> None:
        """Correct the weights after the step of a base optimizer of its own (`_parted`). scale: factor of `g2 - g1`."""
        for bucket, selection, _ in calls if self.mix.sharpness else ():
            for i, difference in zip(selection.slots, bucket.first(selection), strict=True):
                group = groups[bucket.groups[i]]
                factor = group["lr"] * self.mix.sharpness * (-1 if group.get("maximize") else 1)
                local(bucket.params[i]).sub_(
                    difference * (factor if scale is None else factor / scale.to(difference.dtype))
                )

    def _lesson(self, calls: Sequence[Call], sumsq: Tensor, found_inf: Tensor | None) -> list[partial[Any]]:
        """Calls that change the vector which the variant keeps; it stays where a gradient is not finite."""
        if self.memory is Memory.ORTHOGONAL:
            return self._orthogonal(calls, sumsq, found_inf)
        if self.memory is Memory.NONE:
            return []
        fine = sumsq.isfinite() if found_inf is None else sumsq.isfinite() & (found_inf == 0)
        after: list[partial[Any]] = []
        for bucket, _, _ in calls:
            memory, next_ = bucket.field(MEMORY), bucket.field(NEXT)
            torch.where(fine, next_, memory, out=next_)
            after.append(taking(memory, next_))
        return after

    def unit_calls(self, scale: Tensor | None) -> list[partial[Any]]:
        """Return the calls that set the unit after the first step. scale: of its first gradients."""
        if self.memory is not Memory.DIRECTION or self.unit is not None:
            return []
        return [
            partial(
                setattr,
                self,
                "unit",
                torch.ones(1, dtype=torch.float32, device="cpu") if scale is None else scale.clone(),
            )
        ]

    def _orthogonal(self, calls: Sequence[Call], sumsq: Tensor, found_inf: Tensor | None) -> list[partial[Any]]:
        """Calls that keep the part of g2 that is orthogonal to g1."""
        inner = summed(
            calls,
            torch.zeros(1, 2, dtype=torch.float64, device=sumsq.device),
            lambda b, part, grads, total: b.kernels.inner_(total, grads, b.first(part), part.table, True),
        )
        along = inner[0, 0] / (inner[0, 1] + torch.finfo(torch.float64).tiny)
        fine = (sumsq.isfinite() & along.isfinite()) if found_inf is None else sumsq.isfinite() & (found_inf == 0)
        after = []
        for bucket, selection, grads in calls:
            kept, memory = bucket.arena.field(FIRST, bucket.dtype), bucket.arena.field(MEMORY, bucket.dtype)
            kept.mul_(-along)
            if grads:
                torch._foreach_add_(bucket.first(selection), list(grads))
            torch.where(fine, kept, memory, out=kept)
            after.append(taking(memory, kept))
        return after


def taking(field: Tensor, value: Tensor) -> partial[Any]:
    """`field.copy_(value)` as one of the calls of an update."""
    return silent(field.copy_, value)


def silent(function: Callable[..., Any], *operands: Any) -> partial[Any]:
    """`function(*operands)`, a function in C, as one of the calls of an update, which return nothing and have no line
    of Python."""
    if torch.compiler.is_compiling():
        return partial(function, *operands)
    return partial(deque[Any](maxlen=0).extend, map(function, *((operand,) for operand in operands)))


def _inner(calls: Sequence[Call]) -> Tensor:
    """float64 `[1, 2]`: `<g1, g2>` and `||g2||^2`."""
    return summed(
        calls,
        torch.zeros(1, 2, dtype=torch.float64, device=calls[0][0].device if calls else "cpu"),
        lambda b, part, grads, total: b.kernels.inner_(total, b.first(part), grads, part.table, True),
    )


def squares(bucket: Bucket, selection: Selection, grads: Sequence[Tensor], total: Tensor) -> None:
    """Adds the squares of these, each times the weight of a gradient just now, to `total`."""
    selection.load()  # the kernel reads weights, if only to multiply them with 0
    bucket.kernels.update_norm_(total, selection.tensors, None, grads, selection.table, bucket.hparams, accumulate=True)


def _ratio(calls: Sequence[Call]) -> Tensor:
    """float64 `[1]`: `||g||/||m||` of these gradients and the memory, 0 where that is none. The weight of gradients is
    1 or -1 just now."""
    kept = [(b, part, part.views(b.arena.field(MEMORY, b.dtype))) for b, part, _ in calls]
    one = torch.zeros(1, dtype=torch.float64, device=calls[0][0].device if calls else "cpu")
    g, m = summed(calls, one, squares), summed(kept, one, squares)
    return torch.where((m > 0) & g.isfinite(), (g / m).sqrt(), 0.0)


def _or_nonfinite(found_inf: Tensor | None, sumsq: Tensor) -> Tensor:
    """`found_inf`, not 0 where the first gradients were not finite either."""
    found = (~sumsq.isfinite()).to(torch.float32)
    return found if found_inf is None else torch.maximum(found, found_inf.reshape(1))


def _written(bucket: Bucket, selection: Selection) -> list[Tensor]:
    """The gradients that a base optimizer will read."""
    return [local(g) for i in selection.slots if (g := bucket.params[i].grad) is not None]


def with_norm(scalars: Scalars, inputs: UpdateInputs, hparams: Tensor | None = None) -> UpdateInputs:
    """Return the inputs with the squared norm of the combined gradient, if it is clipped by a fused update.

    hparams: numbers of the combined gradient, None for those of the update.
    """
    if scalars.max_grad_norm is None or scalars.rule is None or not inputs.calls:
        return inputs

    def add(bucket: Bucket, part: Selection, grads: Sequence[Tensor], total: Tensor) -> None:
        part.load()  # the kernel reads weights, if only to multiply them with 0
        options = {"g1": inputs.g1(bucket, part), "grad_scale": inputs.grad_scale, "accumulate": True}
        bucket.kernels.update_norm_(total, part.tensors, None, grads, part.table, numbers, **options)

    numbers = scalars.tensor if hparams is None else hparams
    one = torch.zeros(1, dtype=torch.float64, device=inputs.calls[0][0].device)
    return inputs._replace(sumsq=summed(inputs.calls, one, add))


def clip_in_memory(calls: Sequence[Call], limit: float, sharpness: float, scale: Tensor | None) -> None:
    """Clip the combined gradient of a base optimizer that makes its own step.

    Args:
        calls: gradients of each bucket.
        limit: largest norm.
        sharpness: coefficient of `g2 - g1`, which is where the first gradients were.
        scale: factor of `g2 - g1`, None for 1.
    """
    with torch.no_grad():
        kept = [_written(bucket, part) for bucket, part, _ in calls]
        differences = [bucket.first(part) if sharpness else [] for bucket, part, _ in calls]

        def add(bucket: Bucket, part: Selection, grads: Sequence[Tensor], total: Tensor) -> None:
            for i, g in enumerate(grads):
                combined = g.double()
                if sharpness:
                    combined = combined + sharpness * bucket.first(part)[i].double() / (1.0 if scale is None else scale)
                total.add_(combined.square().sum())

        own = [(bucket, part, grads) for (bucket, part, _), grads in zip(calls, kept, strict=True)]
        one = torch.zeros(1, dtype=torch.float64, device=calls[0][0].device if calls else "cpu")
        factor = (limit / (summed(own, one, add).sqrt() + CLIP_EPS)).clamp(max=1.0)
        for g in (g for grads in (*kept, *differences) for g in grads):
            g.mul_(factor.to(g.dtype))


def _corrected(
    bucket: Bucket, selection: Selection, grads: Sequence[Tensor], hparams: Tensor, inputs: UpdateInputs
) -> list[partial[Any]]:
    """`w -= lr*sharpness*(g2 - g1)` from the weights as the update has left them: the update of an SGD with these
    numbers in `hparams`."""
    master = bucket.backup.is_master
    backup = bucket.backup.weights if master else None
    options: dict[str, Any] = {"steps": None, "g1": bucket.first(selection), "first": False, "keep": master}
    options |= {"grad_scale": inputs.grad_scale, "found_inf": inputs.found_inf, "sumsq_v": inputs.sumsq}
    operands = selection.tensors, backup, grads, selection.table, hparams, "sgd", [None]
    calls = op_calls(bucket, operands, options)
    return [*calls, partial(selection.store)] if selection.indirect else calls
