"""Cosines of clients' directions with a direction of the server."""

from __future__ import annotations

import torch
from torch import Tensor

_TINY = 1e-12  # below which a norm counts as zero


def cosines(rows: Tensor, v: Tensor) -> Tensor:
    """Return the cosine of each row `[n, row_size]` with the vector `[row_size]`, or with its own `[n, row_size]`,
    float64 `[n]`; 0 if one of them is zero."""
    rows, v = rows.double(), v.double()
    lengths = torch.linalg.vector_norm(rows, dim=1) * torch.linalg.vector_norm(v, dim=-1)
    return (rows * v).sum(1) / lengths.clamp(min=_TINY)
