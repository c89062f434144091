"""bSAM: trainings with it, and its paper's equations in float64, written without fastsam."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fastsam import BayesNewton, FusedSAM
from fastsam.optim.variants import BSAM
from tests.helpers.variant_cases import RHO, Training, flat, like, problem

SAMPLES = 50
OPTIONS: dict[str, Any] = {"lr": 0.1, "betas": (0.8, 0.9), "weight_decay": 0.01, "damping": 0.1, "scale": 1.5}


def bsam(steps: int, dtype: torch.dtype = torch.float64, sam: BSAM | None = None, **options: Any) -> Training:
    """A training of the variants' problem after so many steps."""
    params = [nn.Parameter(p) for p in problem(dtype)[0]]
    sam = BSAM(RHO, samples=SAMPLES) if sam is None else sam
    return Training(params, FusedSAM(params, BayesNewton, sam=sam, **OPTIONS | options)).steps(range(steps))


def paper(steps: int, rho: float = RHO, samples: float = SAMPLES, maximize: bool = False) -> tuple[Tensor, Tensor]:
    """Moellenhoff and Khan 2023, line by line: the weights and the scale after so many steps. The numbers are drawn as
    the variant says."""
    start, loss = problem()
    sign = -1 if maximize else 1

    def gradient(at: Tensor, t: int) -> Tensor:
        params = [p.clone().requires_grad_() for p in like(at, start)]
        return sign * flat(torch.autograd.grad(loss(params, t), params))

    (b1, b2), delta, gamma = OPTIONS["betas"], OPTIONS["weight_decay"], OPTIONS["damping"]
    w = flat(start)
    m, s = torch.zeros_like(w), torch.full_like(w, OPTIONS["scale"])
    for t in range(steps):
        generator = torch.Generator().manual_seed(t)
        normal = flat([torch.randn(p.shape, generator=generator) for p in start]).double()
        g = gradient(w + normal * (1 / (samples * s)).sqrt(), t)
        g_eps = gradient(w + rho * g / s, t)
        m = b1 * m + (1 - b1) * (g_eps + delta * w)
        s = b2 * s + (1 - b2) * (s.sqrt() * g.abs() + delta + gamma)
        w = w - OPTIONS["lr"] * m / s
    return w, s
