"""Form U, the one step that `FusedSAM` and every federated algorithm are made of: a direction, a radius, a mix of two
gradients.

    d = none, g1, T^2*g1 with T = |w| + eta (ASAM), or what a federated method adds (`fastsam.fed`)
    eps = rho * d / (||d|| + nu)                  ASAM: the norm is that of T*g1
    v = a*g2 + b*g1,   g1 = gradient at w, g2 = gradient at w + eps

and the base optimizer's update of `w` with `v`. The arithmetic stands in `fastsam_kernels.reference`; what stands here
says which numbers it is given.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from fastsam_kernels.hparams import HParam


class Direction(Enum):
    """Where a step looks for the worst case: the direction of the perturbation."""

    NONE = "none"  # no perturbation: one back-propagation
    GRADIENT = "gradient"  # SAM
    ADAPTIVE_GRADIENT = "adaptive gradient"  # ASAM
    GRADIENT_MINUS_DUAL = "gradient minus dual"  # FedSMOO: mu, s, penalty
    CONSTANT = "constant"  # FedLESAM: e, known before the gradient, so one back-propagation
    PATH = "path"  # FedWMSAM: k*e + drift*(w - w^t) in step k, from 0: as well known before the gradient
    GRADIENT_BY_DRIFT = "gradient by drift"  # FedSOL: g1 weighted by how far each weight has come from w^t
    GRADIENT_PLUS = "gradient plus"  # FedTOGA: g1 + e + drift*(w - w^t), and the last step's g2 where it is remembered

    @property
    def backward_passes(self) -> int:
        """Back-propagations of one step: a second one when the direction is found by the first."""
        return 1 if self in (Direction.NONE, Direction.CONSTANT, Direction.PATH) else 2


def perturbation(direction: Direction, rho: Any, eta: Any, nu: float) -> Iterator[tuple[HParam, Any]]:
    """The device scalars of a perturbation: Python numbers, or one-element tensors where they were given."""
    yield HParam.RHO, rho
    yield HParam.PERTURB_EPS, nu
    yield HParam.ADAPTIVE, float(direction is Direction.ADAPTIVE_GRADIENT)
    yield HParam.ETA, eta


def _is_finite(number: float) -> bool:
    """Return False for infinities, NaN, integers beyond float64 and tensors without a value (the meta device)."""
    try:
        return math.isfinite(number)
    except (OverflowError, RuntimeError):
        return False


@dataclass(frozen=True)
class Mix:
    """What of the two gradients the update sees: `v = a*g2 + b*g1`.

    sharpness: WSAM's gamma/(1 - gamma), decoupled (Yue et al. 2023). Not 0: the base optimizer sees g1, and after its
    update `w -= lr*sharpness*(g2 - g1)`; a and b are then 1 and 0.
    reuse: LookSAM's alpha (Liu et al. 2022), of a step with one gradient g. Not 0: `v = g + alpha*||g||/||m||*m` with
    the vector m that the variant keeps.
    surrogate_gap: GSAM's alpha (Zhuang et al. 2022, Algorithm 1). Not 0: g2 without alpha times the part of g1 that is
    orthogonal to it, `v = (1 + alpha*cc)*g2 - alpha*g1` with `cc = <g1, g2>/||g2||^2`; a and b are then 1 and 0.
    Raises ValueError for numbers that are not finite, and for a surrogate gap beside other weights.
    """

    a: float = 1.0
    b: float = 0.0
    surrogate_gap: float = 0.0
    sharpness: float = 0.0
    reuse: float = 0.0

    def __post_init__(self) -> None:
        for name in ("a", "b", "surrogate_gap", "sharpness", "reuse"):
            if not _is_finite(getattr(self, name)):
                raise ValueError(f"{name} must be a finite number, got {getattr(self, name)!r}")
        given = [name for name in ("surrogate_gap", "sharpness", "reuse") if getattr(self, name)]
        if given and (self.a != 1 or self.b or len(given) > 1):
            raise ValueError(f"{given[0]} determines a and b itself; leave them at 1 and 0, and the others at 0")

    @property
    def needs_g1(self) -> bool:
        """Whether the update reads the first gradient too."""
        return bool(self.b or self.surrogate_gap or self.sharpness)

    def columns(self, sign: float = 1.0) -> Iterator[tuple[HParam, float]]:
        """The device scalars; of a surrogate gap those of no overlap, `weigh_` does the rest. sign: -1 where the
        objective is maximised."""
        yield HParam.G2_COEF, sign * self.a
        yield HParam.G1_COEF, sign * (-self.surrogate_gap or self.b)


def weigh_(hparams: Tensor, inner: Tensor, sign: Tensor | float = 1.0) -> None:
    """A surrogate gap's weight of g2, `sign*(1 + alpha*cc)`, without waiting for the device.

    hparams: float64 `[rows, groups, NUM_HPARAMS]`, whose column B is `-sign*alpha`; its column A is written. inner:
    float64 `[rows, 2]`, `<g1, g2>` and `||g2||^2` of `inner_`. sign: a number, or `[rows or 1, groups]`.
    """
    overlap = inner[:, :1] / (inner[:, 1:] + torch.finfo(torch.float64).tiny)
    hparams[:, :, HParam.G2_COEF] = sign - hparams[:, :, HParam.G1_COEF] * overlap
