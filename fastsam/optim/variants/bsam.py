"""bSAM: Moellenhoff and Khan, "SAM as an Optimal Relaxation of Bayes", ICLR 2023 (its algorithm)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor

from fastsam.optim.variants.sam import SAM, check_real, check_seed


@dataclass(frozen=True)
class BSAM(SAM):
    """SAM that keeps a Gaussian over the weights: the first gradient is of weights drawn from it, and its variance
    scales the perturbation.

        z ~ N(w, 1/(samples*s)),   g1 = gradient at z
        e = rho * g1/s,            g2 = gradient at w + e
        m <- b1*m + (1 - b1)*(g2 + delta*w)
        s <- b2*s + (1 - b2)*(sqrt(s)*|g1| + delta + gamma)
        w <- w - lr * m/s

    element by element: neither radius nor direction has a norm. The base optimizer is `fastsam.BayesNewton`, which
    makes the last three lines (delta is its weight_decay, gamma its damping) and keeps m and s; 1/(samples*s) is the
    variance of each weight when training is done.
    samples: the number of training samples N. `step(closure)` draws z by itself; a loop that makes its own backward
    passes calls `sample()` before the first one. z is a function of `seed`, of the number of the step and of s, the
    same on all ranks and after a resume; on another device it is another. Two gradient passes a step; state: between
    them g1 and a copy of the weights, which is there from `sample()` on. Not for steps that torch.compile traces, for
    GradScalers, and for parameters that are split among ranks. Bytes per float32 parameter: 132, 60 of them to save the
    weights, draw z and go there, 24 to keep g1, see that it is finite and divide it by s, 12 for the perturbation, 36
    for the update (torch's calls draw and divide; a fused kernel for each of both moves would take 36 instead of 96).
    Raises ValueError for adaptive, eta, every and radius, which it has no use for, and for samples that are not above
    0, TypeError for a seed that is no integer.
    """

    draws: ClassVar[bool] = True

    samples: float = field(kw_only=True)
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        adaptive = self.adaptive or isinstance(self.eta, Tensor) or self.eta
        if adaptive or self.every != 1 or self.radius is not None:
            raise ValueError(
                "adaptive, eta, every and radius must be left as they are: BSAM perturbs in every step by rho*g1/s, "
                "with no norm, got "
                f"adaptive={self.adaptive!r}, eta={self.eta!r}, every={self.every!r}, radius={self.radius!r}"
            )
        check_real("samples", self.samples)
        if not 0 < self.samples < math.inf:
            raise ValueError(
                f"samples must be the number of training samples, above 0 and finite, got {self.samples!r}"
            )
        check_seed(self.seed)
