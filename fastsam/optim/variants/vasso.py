"""VaSSO: Li and Giannakis, "Enhancing Sharpness-Aware Optimization Through Variance Suppression", NeurIPS 2023
(equation 4)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fastsam.optim.variants.sam import SAM, check_real


@dataclass(frozen=True)
class VaSSO(SAM):
    """Perturbs along an average of the gradients of all steps so far, which one batch does not throw about.

        d <- (1 - theta)*d + theta*g1,   d = 0 before the first step
        eps = rho * d/(||d|| + 1e-12)
        w <- the base optimizer's update with g2 = gradient at w + eps

    theta = 1 is SAM. With `adaptive` d is scaled as ASAM scales g1. Two gradient passes a step; state: d, and between
    the passes its next value, and a copy of the weights. Bytes per float32 parameter beyond SAM's 40: 20 to make the
    direction, 20 to keep d (torch's calls; a fused kernel would take 12). Raises ValueError for a theta outside (0, 1].
    """

    theta: float = 0.9

    def __post_init__(self) -> None:
        super().__post_init__()
        check_real("theta", self.theta, "above 0 and 1 or less", lambda v: 0 < v <= 1)

    def direction(self, g: Tensor, state: Tensor, next_state: Tensor) -> Tensor:
        return torch.lerp(state, g, self.theta, out=next_state)
