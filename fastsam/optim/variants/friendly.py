"""F-SAM: Li, Zhou, He, Cheng and Huang, "Friendly Sharpness-Aware Minimization", CVPR 2024 (Algorithm 1)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fastsam.optim.variants.sam import SAM, check_real


@dataclass(frozen=True)
class FriendlySAM(SAM):
    """Perturbs along the noise of the gradient, without the part that all batches share. An average over the steps
    estimates that part.

        m <- lmbda*m + (1 - lmbda)*g1,   m = 0 before the first step
        d = g1 - sigma*m,   eps = rho * d/(||d|| + 1e-12)
        w <- the base optimizer's update with g2 = gradient at w + eps

    This follows the paper. Published code, also pytorch-optimizer, starts with m = g1 and subtracts the m of the step
    before. With `adaptive` d is scaled as ASAM scales g1. Two gradient passes a step; state: m, and between the passes
    its next value, the direction, and a copy of the weights. Bytes per float32 parameter beyond SAM's 40: 32 to make
    the direction, 20 to keep m (torch's calls; a fused kernel would take 16). Raises ValueError if sigma is negative or
    not finite, or if lmbda is outside [0, 1).
    """

    sigma: float = 1.0
    lmbda: float = 0.9

    def __post_init__(self) -> None:
        super().__post_init__()
        check_real("sigma", self.sigma, "0 or more and finite", lambda v: 0 <= v < float("inf"))
        check_real("lmbda", self.lmbda, "0 or more and below 1", lambda v: 0 <= v < 1)

    def direction(self, g: Tensor, state: Tensor, next_state: Tensor) -> Tensor:
        torch.lerp(state, g, 1 - self.lmbda, out=next_state)
        return g.sub_(next_state, alpha=self.sigma)
