"""Gradient-norm penalty: Zhao, Zhang and Hu, "Penalizing Gradient Norm for Efficiently Improving Generalization in Deep
Learning", ICML 2022."""

from __future__ import annotations

from dataclasses import dataclass

from fastsam.optim.variants.sam import SAM, check_real
from fastsam.step import GradCoefficients


@dataclass(frozen=True)
class GradientPenalty(SAM):
    """Minimizes the loss plus `lambda * ||gradient||`, to first order, with `alpha = lambda / rho`.

        w <- the base optimizer's update with (1 - alpha)*g1 + alpha*g2

    alpha = 0 is the base optimizer, alpha = 1 SAM. Two gradient passes a step; state between them: a copy of the
    weights, and g1. Bytes per float32 parameter beyond SAM's 40: 8 to keep g1, 4 to read it. Raises ValueError for an
    alpha that is negative or not finite.
    """

    alpha: float = 0.8

    def __post_init__(self) -> None:
        super().__post_init__()
        check_real("alpha", self.alpha, "0 or more", lambda v: v >= 0)
        GradCoefficients(g2=self.alpha)

    @property
    def coefficients(self) -> GradCoefficients:
        return GradCoefficients(g2=self.alpha, g1=1 - self.alpha)
