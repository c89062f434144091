"""The coordinate median: Yin, Chen, Ramchandran and Bartlett, "Byzantine-Robust Distributed Learning: Towards Optimal
Statistical Rates", ICML 2018 (Definition 1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fastsam.fed.aggregation.base import RobustAggregator, trimmed_mean


@dataclass(frozen=True)
class Median(RobustAggregator):
    """The median of each element.

        Delta_j = median_i (Delta_i)_j,    for an even number of clients the mean of the two values in the middle

    If fewer than half of the clients send arbitrary values, every element stays within the range of the other clients.
    The median is not a mean: on heterogeneous clients it is biased towards what most clients have in common. All
    clients count alike, so there are no weights. Memory: the rows of the round. Time: a sort of n numbers per element.
    """

    name: ClassVar[str] = "median"

    def mean(self, rows: Sequence[Tensor], weights: Sequence[int]) -> Tensor:
        return trimmed_mean(rows, (len(rows) - 1) // 2)
