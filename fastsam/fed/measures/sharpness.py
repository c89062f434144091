"""Global sharpness: how much the loss can rise within a ball around the weights (FedLESAM paper, section 2.2).

    s_rho(w) = max_{||d|| <= rho} F(w + d) - F(w)

F is the mean loss of the pooled training data, in eval mode, without augmentation. The paper does not say how its
maximum was estimated; both estimates here are lower bounds of it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastsam.fed.measures.objective import Objective, random_unit, unit


def one_step(objective: Objective, w: Tensor, rho: float = 0.1) -> float:
    """Return `F(w + rho * G/||G||) - F(w)` with the gradient G at w `[row_size]`, or 0 if G is zero."""
    direction = unit(objective.gradient(w))
    return objective.value(w.double() + rho * direction) - objective.value(w)


def ascent(objective: Objective, w: Tensor, rho: float = 0.1, steps: int = 20, seed: int = 0) -> float:
    """Return the largest rise of the loss in `steps` steps of projected gradient ascent on d, at least 0 (d = 0).

    A step moves `rho` along the unit gradient at `w + d` and is projected to the ball of radius `rho`. If the gradient
    at w is zero, the first step has a random direction (from `seed`). `steps = 1` is `one_step`.
    """
    base, start = objective.value(w), w.double()
    best, offset = base, torch.zeros_like(start)
    for _ in range(steps):
        direction = unit(objective.gradient(start + offset))
        if not direction.any():
            direction = random_unit(objective.replica, seed)
        offset = offset + rho * direction
        offset = offset * min(1.0, rho / float(offset.norm()))
        best = max(best, objective.value(start + offset))
    return best - base
