"""The loss surface around the weights in two random, filter-normalized directions (Li et al. 2018, FedSAM paper)."""

from __future__ import annotations

import torch
from torch import Tensor

from fastsam.arena import Layout
from fastsam.fed.measures.objective import Objective

POINTS, RADIUS = 51, 1.0  # the grid of Li et al.'s scripts; the axes of the FedSAM paper


def directions(layout: Layout, w: Tensor, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return two Gaussian directions, float64 `[row_size]`. The second is made orthogonal to the first. Then each
    filter is scaled to the norm of the weights' filter.

    A filter is an index of dimension 0, for a linear layer a row. The direction is zero in tensors of rank 1 (biases,
    norms). The directions are orthogonal before the scaling (the FedSAM paper calls them orthogonal), and not exactly
    after it.
    """
    generator = torch.Generator().manual_seed(seed)
    pair = [torch.zeros(layout.row_size, dtype=torch.float64) for _ in range(2)]
    for direction in pair:
        for view in layout.views(direction):
            if view.dim() > 1:
                view.copy_(torch.randn(view.shape, generator=generator, dtype=torch.float64))
    first, second = pair
    if first.any():
        second -= (second @ first) / (first @ first) * first
    return _scale(layout, w, first), _scale(layout, w, second)


def _scale(layout: Layout, w: Tensor, direction: Tensor) -> Tensor:
    """Return `d_f * ||w_f|| / (||d_f|| + 1e-10)` for every filter f."""
    weights = w.detach().double().cpu()
    for d, weight in zip(layout.views(direction), layout.views(weights), strict=True):
        if d.dim() > 1:
            norms = weight.flatten(1).norm(dim=1) / (d.flatten(1).norm(dim=1) + 1e-10)
            d.mul_(norms.view(-1, *[1] * (d.dim() - 1)))
    return direction.to(w.device)


def surface(
    objective: Objective, w: Tensor, pair: tuple[Tensor, Tensor], points: int = POINTS, radius: float = RADIUS
) -> Tensor:
    """Return `F(w + x*d1 + y*d2)`, float64 `[points, points]` on the CPU: row i has y_i, column j has x_j, both from
    -radius to radius.

    Raises ValueError for fewer than 2 points: a grid has two ends.
    """
    if points < 2:
        raise ValueError(f"a surface needs 2 points or more on each axis, got {points}; 51 is the usual grid")
    first, second = pair
    base, axis = w.double(), torch.linspace(-radius, radius, points, dtype=torch.float64).tolist()
    values = [[objective.value(base + x * first + y * second) for x in axis] for y in axis]
    return torch.tensor(values, dtype=torch.float64)
