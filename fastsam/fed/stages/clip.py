"""Clipping of the clients' deltas, and of full gradients that clients send (`fed.Privacy(clip=)`)."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

from fastsam import ops
from fastsam.fed.algorithms.base import Round
from fastsam.fed.stages.base import Stage
from fastsam.fed.update.results import ClientResults
from fastsam_kernels.hparams import NUM_HPARAMS


class Clip(Stage):
    """Scale deltas and full gradients that are longer than `limit` to that norm, each by itself.

    Args:
        limit: largest norm of a row; infinity: no limit.
        local: mask `[row_size]` of the parameters that are never sent, or None. The norms do not include them, and
            they are not scaled.
    """

    def __init__(self, limit: float, local: Tensor | None = None) -> None:
        self.limit, self.local = limit, local

    def process_results(self, results: ClientResults, round: Round) -> list[float]:
        """Clip the deltas and full gradients in place, and return the norms of the deltas."""
        if "full_gradient" in results.outputs:
            self._shorten_sent(results.outputs["full_gradient"])
        return [min(norm, self.limit) for norm in self._shorten_sent(results.delta)]

    def _shorten_sent(self, rows: Tensor) -> list[float]:
        """Shorten the part of rows `[n, row_size]` that is sent, in place, and return its norms before."""
        if self.local is None:
            return shorten_(rows, self.limit)
        self.local = self.local.to(rows.device)
        sent = rows.masked_fill(self.local, 0)
        if self.limit == math.inf:
            return norms_of(sent)
        norms = shorten_(sent, self.limit)
        torch.where(self.local, rows, sent, out=rows)
        return norms


# Largest relative error of a norm from the kernels. The CPU's add up 64 squares in a float32, the others fewer; the
# rest is in float64: half of 66 roundings of 2**-24.
_OFF = 2.0**-18
_FINE = 1e-10, 1e16  # between these no square that counts is lost to float32's range


def norms_of(rows: Tensor) -> list[float]:
    """Return the norm of each of `rows` `[n, row_size]`, up to `_OFF` (relative). It depends on its row only."""
    norm_, table, hparams = _operands(len(rows), rows.shape[1], rows.dtype, rows.device)
    squares = hparams.new_empty(len(rows))
    norm_(squares, [rows], [], table, hparams)
    return [math.sqrt(x) for x in squares.tolist()]


@lru_cache(8)
def _operands(
    n: int, length: int, dtype: torch.dtype, device: torch.device
) -> tuple[Callable[..., None], Tensor, Tensor]:
    """Return the compiled kernel, else the reference's, the table of rows that are one segment, and the
    hyperparameters."""
    try:
        kernels = ops.bind("native", device, dtype)
    except RuntimeError:  # there is none here
        kernels = ops.bind("reference", device, dtype)
    table = torch.tensor([[0, length, 0, 0]], device=device)
    hparams = torch.zeros(n, 1, NUM_HPARAMS, dtype=torch.float64, device=device)
    return kernels.norm_, table, hparams


def shorten_(rows: Tensor, limit: float) -> list[float]:
    """Scale rows `[n, row_size]` that are longer than `limit` to that norm, and return the norms before.

    Rows that are not finite stay as they are. No row is longer than `limit` afterwards, not even by rounding. A norm
    that is too close to `limit`, or whose squares float32 cannot hold, is computed in float64, and the factor is
    smaller by twice the possible error of the norm. Shorter rows keep their bits.
    """
    norms = norms_of(rows)
    for i, norm in enumerate(norms):
        if abs(norm - limit) <= 2 * _OFF * limit or not _FINE[0] < norm < _FINE[1]:
            norms[i] = float(torch.linalg.vector_norm(rows[i], dtype=torch.float64))
    if max(norms) <= limit:
        return norms
    target = (1 - 2 * _OFF) * limit
    factors = [1.0 if norm <= limit else target / norm for norm in norms]
    if len(factors) == 1:
        rows.mul_(factors[0])
    else:
        rows.mul_(torch.tensor(factors, dtype=rows.dtype).to(rows.device)[:, None])
    return norms
