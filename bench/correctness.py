"""The correctness check before every measurement. A contender that computes something else is not timed.

The reference is `FusedSAM` in float64 on the backend `reference`. A contender takes the same steps and is compared with
it after every phase. Comparing final weights would not do: the gradients are prepared, so a wrong perturbation would
leave no trace in them.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from bench.contenders import Contender, Stepper, ours
from bench.workload import Gradients

STEPS = 2  # the second step is the first that shows what momentum kept
# elements that are compared at once: small temporaries, but few waits for a GPU
PIECE = {"cpu": 1 << 16, "cuda": 1 << 24}
EPS = torch.finfo(torch.float32).eps
# Updated weights, per element: UPDATE * steps * eps * (max|w| + max|change|), the maxima over the tensor. A handful of
# float32 operations per step, each rounded to half an eps of its operands, which may cancel: hence the tensor's scale
# and not the element's.
UPDATE = 4.0
# Perturbation z - w, per element: eps * (|w| + |e|) for its addition, and `Contender.norm_error * |e|` for the norm.


def excess(compare: Callable[..., tuple[Tensor, Tensor, Tensor]], *operands: Iterable[Tensor]) -> str | None:
    """Apply `compare` -> (got, expected, allowed) to pieces of the operands. Return the first that is out of bounds."""
    for i, tensors in enumerate(zip(*operands, strict=True)):
        for pieces in zip(*(t.reshape(-1).split(PIECE[t.device.type]) for t in tensors), strict=True):
            actual, target, tolerance = compare(*pieces)
            surplus = (actual - target).abs_() - tolerance
            if bool((surplus <= 0).all()):  # false with a NaN
                continue
            worst = int(surplus.nan_to_num_(nan=float("inf")).argmax())
            values = (float(t.expand(surplus.shape)[worst]) for t in (actual, target, tolerance))
            return "tensor {} has {:.9g} where {:.9g} is expected within {:.2g}".format(i, *values)
    return None


class Doubles(Gradients):
    """Gradients in float64, made by each call."""

    def __init__(self, gradients: Gradients) -> None:
        self.sets = gradients.sets

    def tensors(self, index: int) -> Sequence[Tensor]:
        return [g.double() for g in super().tensors(index)]


CheckResult = tuple[dict[str, Stepper], dict[str, str]]


def check(contenders: Sequence[Contender], weights: Sequence[Tensor], gradients: Gradients) -> CheckResult:
    """Build every contender and take `STEPS` steps with it.

    Returns:
        The steppers that agree with their reference, ready to be measured, and the reason of each other contender by
        name: its disagreement, or the exception that it raised. A peer that breaks with a new version of torch costs
        only its own row.
    """
    steppers: dict[str, Stepper] = {}
    problems: dict[str, str] = {}

    def attempt(contender: Contender, location: str, act: Callable[..., str | None], *arguments: Any) -> None:
        if contender.name in problems:
            return
        try:
            problem = act(contender, *arguments)
        except Exception as error:
            problem = f"raised {type(error).__name__}: {error}"
        if problem is not None:
            problems[contender.name] = f"{location}: {problem}"
            steppers.pop(contender.name, None)

    def build(contender: Contender) -> None:
        steppers[contender.name] = contender.build(weights)

    def phase(contender: Contender, index: int, number: int, start: list[Tensor], step: int) -> str | None:
        """Take one phase of a contender and compare it with the reference, which has taken it."""
        stepper, last = steppers[contender.name], number + 1 == len(phases)
        stepper.set_grads(gradients, index)
        old_weights = [] if last else _copies(stepper)
        phases_by_name[contender.name][number]()
        if last:
            return _update(stepper.weights(), start, reference.weights(), UPDATE * step * EPS)
        return _perturbation(old_weights, stepper.weights(), start, reference.weights(), contender.norm_error)

    groups: dict[str, list[Contender]] = {}
    for contender in contenders:
        attempt(contender, "building it", build)
        groups.setdefault(str(contender.sam), []).append(contender)
    for group in (group for group in groups.values() if group[0].sam is not None):
        reference = ours("reference", group[0].sam)([w.double() for w in weights])
        doubles, passes = Doubles(gradients), 0
        for step in range(1, STEPS + 1):
            phases, start = reference.phases(), _copies(reference)
            phases_by_name = {one.name: steppers[one.name].phases() for one in group if one.name in steppers}
            for number, act in enumerate(phases):
                reference.set_grads(doubles, passes)
                act()
                location = f"weights after step {step}" if act is phases[-1] else f"perturbation of step {step}"
                for contender in group:
                    attempt(contender, location, phase, passes, number, start, step)
                passes += 1
    return steppers, problems


def _copies(stepper: Stepper) -> list[Tensor]:
    return [w.clone() for w in stepper.weights()]


def _perturbation(
    old_weights: Sequence[Tensor],
    actual: Sequence[Tensor],
    start: Sequence[Tensor],
    target: Sequence[Tensor],
    norm_error: float,
) -> str | None:
    def compare(w: Tensor, z: Tensor, origin: Tensor, point: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        w, e = w.double(), point - origin
        return z - w, e, (w.abs() + e.abs()).mul_(EPS).add_(e.abs(), alpha=norm_error)

    return excess(compare, old_weights, actual, start, target)


def _update(actual: Sequence[Tensor], start: Sequence[Tensor], target: Sequence[Tensor], share: float) -> str | None:
    pairs = zip(target, start, strict=True)
    bounds = [w.new_tensor(share * (_largest(w) + _largest(w - origin))).expand(w.numel()) for w, origin in pairs]
    return excess(lambda w, value, tolerance: (w.double(), value, tolerance), actual, target, bounds)


def _largest(tensor: Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0
