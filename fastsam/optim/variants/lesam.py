"""LE-SAM: Wang, Liu, Xie and Gao, "Fix the Loss, Not the Radius: Rethinking the Adversarial Perturbation of
Sharpness-Aware Minimization", ICML 2026."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fastsam.optim.variants.sam import check_real


@dataclass(frozen=True)
class LESAM:
    """Function `rho_fn` of a variant with which the loss rises by the same amount in every step, to first order:
    `SAM(rho=0.5, rho_fn=LESAM(sigma=0.1))`.

        rho_t = min(sigma/||g1||, rho),   eps = rho_t * g1/||g1||

    rho, the option of the groups, is the largest radius. ||.|| is the norm by which the perturbation is divided, with
    `adaptive` the norm of T*g1. The paper lets sigma fall to zero in the last epochs; lower `rho` for that. With a
    GradScaler the norm is computed from the unscaled gradient, once the scaler is known. The radius of the very first
    step is too small by its scale. No state, no bytes; a few numbers on the device. Raises ValueError if sigma is not
    above 0 and finite.
    """

    sigma: float

    def __post_init__(self) -> None:
        check_real("sigma", self.sigma, "above 0 and finite", lambda v: 0 < v < math.inf)

    def __call__(self, rho: Tensor, norm: Tensor) -> Tensor:
        return torch.minimum(self.sigma / norm, rho)
