"""Weights that an algorithm gives its clients beside those of the run: `Upload(weight=...)`."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fastsam.fed.sums.fixed_point import FixedPointAggregate

WEIGHT = "weight of the client"  # the name under which weights enter the sums


def weighed(rows: Mapping[str, Tensor], weights: Tensor) -> dict[str, Tensor]:
    """The weights (float64 `[n]`) and the rows `[n, ...]` times them: float64, so each is rounded once before it enters
    the sums."""
    shaped = {name: weights.view(-1, *[1] * (x.dim() - 1)) for name, x in rows.items()}
    return {WEIGHT: weights[:, None], **{name: x.double() * shaped[name] for name, x in rows.items()}}


class OwnWeights:
    """The sums of a round whose means are over the weights that were sent too; the rest is that of the sums."""

    def __init__(self, aggregate: FixedPointAggregate) -> None:
        self._aggregate = aggregate

    @property
    def num_clients(self) -> int:
        """See `Aggregate`."""
        return self._aggregate.num_clients

    def mean(self, name: str) -> Tensor:
        """Weighted mean, float64; zeros where all weights are 0. Raises KeyError for a name nobody sent."""
        mean, weight = self._aggregate.mean(name), self._aggregate.mean(WEIGHT)
        return torch.where(weight > 0, mean / weight, 0.0)

    def sum(self, name: str) -> Tensor:
        """See `Aggregate`."""
        return self._aggregate.sum(name)

    def scalar(self, name: str) -> float:
        """See `Aggregate`."""
        return self._aggregate.scalar(name)
