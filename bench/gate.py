"""The correctness gate: no time is shown for a contender whose numbers are wrong on the very input that is measured.

All contenders take the same steps in lockstep with `fastsam_kernels.reference` in float64, and are compared with it at
every perturbed and every updated point. Comparing final weights would not do: the gradients are prepared, so a wrong
perturbation would leave no trace in them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from bench.contenders import Contender, Stepper
from bench.problem import LR, MOMENTUM, NU, RHO, WEIGHT_DECAY, Gradients
from fastsam.arena import Arena, Layout
from fastsam_kernels import reference
from fastsam_kernels.columns import WIDTH, Column
from fastsam_kernels.rules import sgd

STEPS = 2  # the second step is the first that shows what momentum kept
# elements that are compared at once: small temporaries, but few waits for a GPU
PIECE = {"cpu": 1 << 16, "cuda": 1 << 24}
EPS = torch.finfo(torch.float32).eps
# Updated weights, per element: UPDATE * steps * eps * (max|w| + lr*max|m|), the maxima over the tensor. A handful of
# float32 operations per step, each rounded to half an eps of its operands, which may cancel: hence the tensor's scale
# and not the element's.
UPDATE = 4.0
# Perturbation z - w, per element: eps * (|w| + |e|) for its addition, and `Contender.norm_error * |e|` for the norm.


class Reference:
    """The same SAM step in float64, by the executable specification."""

    def __init__(self, weights: Sequence[Tensor]) -> None:
        self.weights = [w.detach().double() for w in weights]
        layout = Layout.of(self.weights)
        self.table = layout.table
        arena = Arena(layout, device=self.weights[0].device)
        self.origin, self.momentum = arena.field("origin", torch.float64), arena.field("momentum", torch.float64)
        self.origins, self.momenta = arena.views("origin"), arena.views("momentum")
        self.sumsq = torch.zeros(1, dtype=torch.float64, device=arena.device)
        self.hyper = torch.zeros(1, 1, WIDTH, dtype=torch.float64, device=arena.device)
        constants = ((Column.RHO, RHO), (Column.NU, NU), (Column.A, 1.0), (Column.LR, LR), (sgd.MOMENTUM, MOMENTUM))
        for column, value in (*constants, (Column.DECAY, WEIGHT_DECAY)):
            self.hyper[0, 0, column] = value
        self.steps = 0

    def first(self, gradients: Sequence[Tensor]) -> None:
        doubles = [g.double() for g in gradients]
        reference.norm_(self.sumsq, doubles, [], self.table, self.hyper)
        reference.perturb_(self.weights, self.origin, doubles, self.table, self.hyper, self.sumsq, save=True)

    def second(self, gradients: Sequence[Tensor]) -> None:
        doubles, first_ever = [g.double() for g in gradients], self.steps == 0
        reference.update_(
            self.weights, self.origin, doubles, self.table, self.hyper, "sgd", [self.momentum], first=first_ever
        )
        self.steps += 1

    def perturbation_error(self, before: Sequence[Tensor], got: Sequence[Tensor], norm_error: float) -> str | None:
        """Where the perturbation leaves the tolerance; None when it is within."""

        def compare(w: Tensor, z: Tensor, expected: Tensor, origin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            w, e = w.double(), expected - origin
            return z - w, e, (w.abs() + e.abs()).mul_(EPS).add_(e.abs(), alpha=norm_error)

        return _first_excess(compare, before, got, self.weights, self.origins)

    def update_error(self, got: Sequence[Tensor]) -> str | None:
        """Where the updated weights leave the tolerance; None when they are within."""
        bounds = [
            w.new_tensor(UPDATE * self.steps * EPS * (_largest(w) + LR * _largest(m))).expand(w.numel())
            for w, m in zip(self.weights, self.momenta, strict=True)
        ]

        def compare(w: Tensor, expected: Tensor, bound: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            return w.double(), expected, bound

        return _first_excess(compare, got, self.weights, bounds)


def _largest(tensor: Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0


def _first_excess(compare: Callable[..., tuple[Tensor, Tensor, Tensor]], *operands: Sequence[Tensor]) -> str | None:
    """Applies `compare` -> (got, expected, allowed) to pieces of the operands; says where the first one is out of
    bounds."""
    for i, tensors in enumerate(zip(*operands, strict=True)):
        for pieces in zip(*(t.reshape(-1).split(PIECE[t.device.type]) for t in tensors), strict=True):
            got, expected, allowed = compare(*pieces)
            excess = (got - expected).abs_() - allowed
            if bool((excess <= 0).all()):  # false with a NaN
                continue
            worst = int(excess.nan_to_num_(nan=float("inf")).argmax())
            values = (float(t[worst]) for t in (got, expected, allowed))
            return "tensor {} has {:.9g} where {:.9g} is expected within {:.2g}".format(i, *values)
    return None


def check(
    contenders: Sequence[Contender],
    weights: Sequence[Tensor],
    gradients: Gradients,
    begin: Callable[[Contender], None] = lambda contender: None,
) -> tuple[dict[str, Stepper], dict[str, str]]:
    """Builds every contender and takes `STEPS` steps with it; `begin` is told whose turn it is to be built.

    Returns the steppers that agree with the reference, ready to be measured, and per name of the others the reason: how
    they disagree, or the exception that they raised (a peer that breaks with a new version of torch must not take the
    whole table with it).
    """
    trials = []
    for contender in contenders:
        begin(contender)
        trials.append(Trial(contender, weights))
    expected = Reference(weights)
    for step in range(STEPS):
        expected.first(gradients.tensors(2 * step))
        for trial in trials:
            trial.first(expected, gradients, 2 * step)
        expected.second(gradients.tensors(2 * step + 1))
        for trial in trials:
            trial.second(expected, gradients, 2 * step + 1)
    green = {t.contender.name: t.stepper for t in trials if t.reason is None and t.stepper is not None}
    return green, {t.contender.name: t.reason for t in trials if t.reason is not None}


class Trial:
    """One contender in the gate, and the first thing that was wrong with it."""

    def __init__(self, contender: Contender, weights: Sequence[Tensor]) -> None:
        self.contender = contender
        self.stepper: Stepper | None = None
        self.reason: str | None = None
        self._attempt("building it", lambda: self._build(weights))

    def first(self, expected: Reference, gradients: Gradients, index: int) -> None:
        self._attempt(f"perturbation of step {expected.steps + 1}", lambda: self._first(expected, gradients, index))

    def second(self, expected: Reference, gradients: Gradients, index: int) -> None:
        self._attempt(f"weights after step {expected.steps}", lambda: self._second(expected, gradients, index))

    def _attempt(self, where: str, action: Callable[[], str | None]) -> None:
        if self.reason is not None:
            return
        try:
            found = action()
        except Exception as error:
            found = f"raised {type(error).__name__}: {error}"
        if found is not None:
            self.reason, self.stepper = f"{where}: {found}", None

    def _build(self, weights: Sequence[Tensor]) -> None:
        self.stepper = self.contender.build(weights)

    def _first(self, expected: Reference, gradients: Gradients, index: int) -> str | None:
        stepper = self._ready(gradients, index)
        before = [w.clone() for w in stepper.weights()]
        stepper.first()
        return expected.perturbation_error(before, stepper.weights(), self.contender.norm_error)

    def _second(self, expected: Reference, gradients: Gradients, index: int) -> str | None:
        stepper = self._ready(gradients, index)
        stepper.second()
        return expected.update_error(stepper.weights())

    def _ready(self, gradients: Gradients, index: int) -> Stepper:
        assert self.stepper is not None  # reason is None until now, so it was built
        self.stepper.take(gradients, index)
        return self.stepper
