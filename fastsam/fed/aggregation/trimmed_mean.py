"""The coordinate-wise trimmed mean: Yin, Chen, Ramchandran and Bartlett, "Byzantine-Robust Distributed Learning:
Towards Optimal Statistical Rates", ICML 2018 (Definition 2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fastsam.fed.aggregation.base import RobustAggregator, count_of_share, trimmed_mean
from fastsam.fed.common.checks import number


@dataclass(frozen=True)
class TrimmedMean(RobustAggregator):
    """The mean of each element without its k largest and its k smallest values.

        Delta_j = 1/(n - 2k) * sum of (Delta_i)_j over the i that are left,    k = ceil(share * n)

    The paper takes share*n to be whole. Here it is rounded up, and one value or two are left where more would be cut.
    share = 0 is the mean. All clients count alike, so there are no weights. Memory: the rows of the round. Time: a sort
    of n numbers per element.

    Args:
        share: beta of the paper, the share of the clients that may send arbitrary values, at most 1/2.
    """

    name: ClassVar[str] = "trimmed_mean"

    share: float = 0.2

    def __post_init__(self) -> None:
        number("share", self.share, at_least=0, at_most=0.5)

    def mean(self, rows: Sequence[Tensor], weights: Sequence[int]) -> Tensor:
        return trimmed_mean(rows, min(count_of_share(self.share, len(rows)), (len(rows) - 1) // 2))
