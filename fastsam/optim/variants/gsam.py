"""GSAM: Zhuang, Gong, Yuan, Cui, Adam, Dvornek, Tatikonda, Duncan and Liu, "Surrogate Gap Minimization Improves
Sharpness-Aware Training", ICLR 2022 (Algorithm 1)."""

from __future__ import annotations

from dataclasses import dataclass

from fastsam.optim.variants.sam import SAM, check_real
from fastsam.step import GradCoefficients


@dataclass(frozen=True)
class GSAM(SAM):
    """Lowers the perturbed loss, and its gap to the loss itself.

        g1 = (part along g2) + g1_perp,   over all parameters as one vector
        w <- the base optimizer's update with g2 - alpha*g1_perp

    `fastsam.optim.variant_step` takes the inner products, and `fastsam.step.set_gsam_coefficients_` makes the
    weights of g1 and g2 of them.
    alpha = 0 is SAM. The paper lets rho fall with the learning rate, as `rho_scheduler.LinearRho` does. A first
    gradient with inf or NaN updates nothing. Two gradient passes a step; state between them: a copy of the weights, and
    g1. Raises ValueError if alpha is negative or not finite.
    """

    alpha: float = 0.4

    def __post_init__(self) -> None:
        super().__post_init__()
        check_real("alpha", self.alpha, "0 or more", lambda v: v >= 0)
        GradCoefficients(gsam_alpha=self.alpha)

    @property
    def coefficients(self) -> GradCoefficients:
        return GradCoefficients(gsam_alpha=self.alpha)
