"""The mix of the two gradients in the update of `FusedSAM` and of FedGSAM.

    v = a*g2 + b*g1,   g1 = gradient at w, g2 = gradient at w + eps

and the base optimizer's update of `w` with `v`. `fastsam_kernels.reference` has the arithmetic. This module says which
numbers it gets.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from fastsam_kernels.hparams import HParam


def _is_finite(number: float) -> bool:
    """Return False for infinities, NaN, integers beyond float64 and tensors without a value (the meta device)."""
    try:
        return math.isfinite(number)
    except (OverflowError, RuntimeError):
        return False


@dataclass(frozen=True)
class GradCoefficients:
    """Coefficients of the two gradients in the update: `v = a*g2 + b*g1`.

    Attributes:
        g2: a, the coefficient of the gradient at the perturbed point.
        g1: b, the coefficient of the gradient at the unperturbed point.
        gsam_alpha: GSAM's alpha (Zhuang et al. 2022, Algorithm 1). If it is not 0, the update leaves out alpha times
            the part of g1 that is orthogonal to g2: `v = (1 + alpha*cc)*g2 - alpha*g1`, `cc = <g1, g2>/||g2||^2`.
        wsam_weight: WSAM's gamma/(1 - gamma), decoupled (Yue et al. 2023). If it is not 0, the base optimizer sees g1,
            and after its update `w -= lr*wsam_weight*(g2 - g1)`.
        looksam_alpha: LookSAM's alpha (Liu et al. 2022), of a step with one gradient g. If it is not 0,
            `v = g + alpha*||g||/||m||*m` with the vector m that the variant keeps.

    Raises ValueError for numbers that are not finite, and if one of the last three is combined with other coefficients.
    """

    g2: float = 1.0
    g1: float = 0.0
    gsam_alpha: float = 0.0
    wsam_weight: float = 0.0
    looksam_alpha: float = 0.0

    def __post_init__(self) -> None:
        for name in ("g2", "g1", "gsam_alpha", "wsam_weight", "looksam_alpha"):
            if not _is_finite(getattr(self, name)):
                raise ValueError(f"{name} must be a finite number, got {getattr(self, name)!r}")
        names = [name for name in ("gsam_alpha", "wsam_weight", "looksam_alpha") if getattr(self, name)]
        if names and (self.g2 != 1 or self.g1 or len(names) > 1):
            raise ValueError(f"{names[0]} determines g2 and g1 itself; leave them at 1 and 0, and the others at 0")

    @property
    def needs_g1(self) -> bool:
        """True if the update reads the first gradient, too."""
        return bool(self.g1 or self.gsam_alpha or self.wsam_weight)

    def columns(self, sign: float = 1.0) -> Iterator[tuple[HParam, float]]:
        """Yield the hyperparameters. For GSAM they assume no overlap, and `set_gsam_coefficients_` corrects them.

        Args:
            sign: -1 if the objective is maximised, else 1.
        """
        yield HParam.G2_COEF, sign * self.g2
        yield HParam.G1_COEF, sign * (-self.gsam_alpha or self.g1)


def set_gsam_coefficients_(hparams: Tensor, inner: Tensor, sign: Tensor | float = 1.0) -> None:
    """Write a surrogate gap's weight of g2, `sign*(1 + alpha*cc)`, without waiting for the device.

    Args:
        hparams: float64 `[rows, groups, NUM_HPARAMS]`. `HParam.G1_COEF` is `-sign*alpha`; `HParam.G2_COEF` is written.
        inner: float64 `[rows, 2]`, `<g1, g2>` and `||g2||^2` of `inner_`.
        sign: a number, or `[rows or 1, groups]`.
    """
    overlap = inner[:, :1] / (inner[:, 1:] + torch.finfo(torch.float64).tiny)
    hparams[:, :, HParam.G2_COEF] = sign - hparams[:, :, HParam.G1_COEF] * overlap
