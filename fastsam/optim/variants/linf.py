"""SAM in the ball of the largest element: Foret, Kleiner, Mobahi and Neyshabur, "Sharpness-Aware Minimization for
Efficiently Improving Generalization", ICLR 2021 (equation 2 with p = infinity)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fastsam.optim.variants.sam import SAM, VariantState


@dataclass(frozen=True)
class LInfSAM(SAM):
    """SAM whose perturbation moves each weight by rho, against the sign that lowers the loss.

        eps = rho * sign(g1)
        w <- the base optimizer's update with g2 = gradient at w + eps

    Radii are much smaller than SAM's, since the L2 norm of eps is rho times the root of the number of weights. A weight
    whose gradient is 0 stays. Two gradient passes a step; state: a copy of the weights between them. Bytes per float32
    parameter beyond SAM's 40: 28 to make the direction (torch's calls). Raises ValueError for `adaptive`.
    """

    norm_degree: ClassVar[float] = math.inf
    state: ClassVar[VariantState] = VariantState.NONE

    rho: float | Tensor = 0.001

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.adaptive:
            raise ValueError("adaptive must be left at False: LInfSAM moves each weight by the same distance")

    def direction(self, g: Tensor, state: Tensor, next_state: Tensor) -> Tensor:
        return torch.sign(g).add_(g.mul_(0.0))  # NaN for an infinite gradient, which must not perturb
