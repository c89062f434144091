"""Displacements of bounded length: how far one client can move a sum."""

from __future__ import annotations

import torch
from torch import Tensor


def norms_of(rows: Tensor) -> Tensor:
    """Of each of `rows` `[n, stride]`, float64 `[n]`; of a row alone the same bits as among others, where executors promise that."""
    if len(rows) == 1:
        return torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64)
    if rows.is_cuda:  # a reduction's order may depend on how many rows there are
        return torch.stack([torch.linalg.vector_norm(row, dtype=torch.float64) for row in rows])
    return rows.double().square().sum(1).sqrt_()  # of stacked clients alone; faster for small models


def shorten_(rows: Tensor, limit: float) -> list[float]:
    """Scales those of `rows` `[n, stride]` that are longer to the norm `limit`; returns the norms that they came with. What is not finite stays so.

    No row is longer than `limit` afterwards, not by a rounding either: the factor and the product are each rounded once, and the factor is
    two units in the last place smaller than it would have to be.
    """
    norms: list[float] = norms_of(rows).tolist()
    if all(norm <= limit for norm in norms):
        return norms
    most = (1 - 2 * torch.finfo(rows.dtype).eps) * limit
    factors = [1.0 if norm <= limit else most / norm for norm in norms]
    if len(factors) == 1:
        rows.mul_(factors[0])
    else:
        rows.mul_(torch.tensor(factors, dtype=rows.dtype).to(rows.device)[:, None])
    return norms
