"""The correctness gate: no time is shown for a contender whose numbers are wrong on the very input that is measured.

All contenders take the same steps in lockstep with `fastsam_kernels.reference` in float64, and are compared with it at
every perturbed and every updated point. Comparing final weights would not do: the gradients are prepared, so a wrong
perturbation would leave no trace in them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from bench.contenders import Contender, Stepper
from bench.problem import LR, MOMENTUM, NU, RHO, WEIGHT_DECAY, Gradients
from fastsam.arena import Arena, Layout
from fastsam_kernels import reference
from fastsam_kernels.columns import WIDTH, HParam
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


def excess(compare: Callable[..., tuple[Tensor, Tensor, Tensor]], *operands: Iterable[Tensor]) -> str | None:
    """Apply `compare` -> (got, expected, allowed) to pieces of the operands. Return the first that is out of bounds."""
    for i, tensors in enumerate(zip(*operands, strict=True)):
        for pieces in zip(*(t.reshape(-1).split(PIECE[t.device.type]) for t in tensors), strict=True):
            got, expected, allowed = compare(*pieces)
            over = (got - expected).abs_() - allowed
            if bool((over <= 0).all()):  # false with a NaN
                continue
            worst = int(over.nan_to_num_(nan=float("inf")).argmax())
            values = (float(t.expand(over.shape)[worst]) for t in (got, expected, allowed))
            return "tensor {} has {:.9g} where {:.9g} is expected within {:.2g}".format(i, *values)
    return None


class Reference:
    """The same SAM step in float64, by the executable specification."""

    def __init__(self, weights: Sequence[Tensor]) -> None:
        self.weights = [w.detach().double() for w in weights]
        layout = Layout.of(self.weights)
        self.table = layout.table
        arena = Arena(layout, device=self.weights[0].device)
        self.backup, self.momentum = arena.field("backup", torch.float64), arena.field("momentum", torch.float64)
        self.origins, self.momenta = arena.views("backup"), arena.views("momentum")
        self.sumsq = torch.zeros(1, dtype=torch.float64, device=arena.device)
        self.hparams = torch.zeros(1, 1, WIDTH, dtype=torch.float64, device=arena.device)
        constants = ((HParam.RHO, RHO), (HParam.NU, NU), (HParam.A, 1.0), (HParam.LR, LR), (sgd.MOMENTUM, MOMENTUM))
        for column, value in (*constants, (HParam.DECAY, WEIGHT_DECAY)):
            self.hparams[0, 0, column] = value
        self.steps = 0

    def first(self, gradients: Sequence[Tensor]) -> None:
        doubles = [g.double() for g in gradients]
        reference.norm_(self.sumsq, doubles, [], self.table, self.hparams)
        reference.perturb_(self.weights, self.backup, doubles, self.table, self.hparams, self.sumsq, save=True)

    def second(self, gradients: Sequence[Tensor]) -> None:
        doubles, first_ever = [g.double() for g in gradients], self.steps == 0
        reference.update_(
            self.weights, self.backup, doubles, self.table, self.hparams, "sgd", [self.momentum], first=first_ever
        )
        self.steps += 1

    def perturbation_error(self, before: Sequence[Tensor], got: Sequence[Tensor], norm_error: float) -> str | None:
        """Return where the perturbation leaves the tolerance; None if it is within."""

        def compare(w: Tensor, z: Tensor, expected: Tensor, backup: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            w, e = w.double(), expected - backup
            return z - w, e, (w.abs() + e.abs()).mul_(EPS).add_(e.abs(), alpha=norm_error)

        return excess(compare, before, got, self.weights, self.origins)

    def update_error(self, got: Sequence[Tensor]) -> str | None:
        """Return where the updated weights leave the tolerance; None if they are within."""
        bounds = [
            w.new_tensor(UPDATE * self.steps * EPS * (_largest(w) + LR * _largest(m))).expand(w.numel())
            for w, m in zip(self.weights, self.momenta, strict=True)
        ]
        return excess(lambda w, expected, bound: (w.double(), expected, bound), got, self.weights, bounds)


def _largest(tensor: Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0


def check(
    contenders: Sequence[Contender], weights: Sequence[Tensor], gradients: Gradients
) -> tuple[dict[str, Stepper], dict[str, str]]:
    """Build every contender and take `STEPS` steps with it.

    Returns:
        The steppers that agree with the reference, ready to be measured; and per name of the other contenders the
        reason: how they disagree, or the exception that they raised. A peer that breaks with a new version of torch
        costs its own row only.
    """
    green: dict[str, Stepper] = {}
    red: dict[str, str] = {}

    def attempt(contender: Contender, where: str, act: Callable[[], str | None]) -> None:
        if contender.name in red:
            return
        try:
            found = act()
        except Exception as error:
            found = f"raised {type(error).__name__}: {error}"
        if found is not None:
            red[contender.name] = f"{where}: {found}"
            green.pop(contender.name, None)

    def build(contender: Contender) -> None:
        green[contender.name] = contender.build(weights)

    def first(contender: Contender, index: int) -> str | None:
        stepper = green[contender.name]
        stepper.take(gradients, index)
        before = [w.clone() for w in stepper.weights()]
        stepper.first()
        return expected.perturbation_error(before, stepper.weights(), contender.norm_error)

    def second(contender: Contender, index: int) -> str | None:
        stepper = green[contender.name]
        stepper.take(gradients, index)
        stepper.second()
        return expected.update_error(stepper.weights())

    for contender in contenders:
        attempt(contender, "building it", lambda: build(contender))  # noqa: B023
    expected = Reference(weights)
    for index in range(0, 2 * STEPS, 2):
        expected.first(gradients.tensors(index))
        for contender in contenders:
            attempt(contender, f"perturbation of step {index // 2 + 1}", lambda: first(contender, index))  # noqa: B023
        expected.second(gradients.tensors(index + 1))
        for contender in contenders:
            attempt(contender, f"weights after step {index // 2 + 1}", lambda: second(contender, index + 1))  # noqa: B023
    return green, red
