"""LookSAM: Liu, Mai, Chen, Hsieh and You, "Towards Efficient and Scalable Sharpness-Aware Minimization", CVPR 2022
(Algorithm 1)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fastsam.optim.variants.sam import SAM, VariantState, check_interval, check_real
from fastsam.step import GradCoefficients


@dataclass(frozen=True)
class LookSAM(SAM):
    """SAM in the first of every k steps. The other steps reuse the part of its gradient that leads to flat regions.

        every k-th step:  m <- g2 - (<g1, g2>/||g1||^2) * g1,   w <- the base optimizer's update with g2
        the others:       w <- the base optimizer's update with g1 + alpha * (||g1||/||m||) * m

    ||.|| and <.,.> are over all parameters as one vector, as in the paper. Code that computes them layer by layer makes
    other steps. Gradient passes a step: 1 + 1/k. State: m in the gradients' dtype; in every k-th step a copy of the
    weights, and g1. Bytes per float32 parameter with SGD and momentum: in every k-th step 40 of SAM, 8 to keep g1, 48
    to make m (torch's calls); in the others 20 of SGD, 12 to read g1 and m.

    Raises TypeError if k is not an integer, and ValueError if k is below 1, if alpha is negative or not finite, and for
    `interval`, which k replaces.
    """

    state: ClassVar[VariantState] = VariantState.ORTHOGONAL

    k: int = 10
    alpha: float = 0.7

    def __post_init__(self) -> None:
        super().__post_init__()
        check_interval("k", self.k)
        if self.interval != 1:
            raise ValueError(f"interval must be left at 1, because LookSAM has k in its place, got {self.interval!r}")
        check_real("alpha", self.alpha, "0 or more", lambda v: v >= 0)
        GradCoefficients(looksam_alpha=self.alpha)

    @property
    def unperturbed_coefficients(self) -> GradCoefficients:
        return GradCoefficients(looksam_alpha=self.alpha)

    def perturbs(self, step: int) -> bool:
        return step % self.k == 0
