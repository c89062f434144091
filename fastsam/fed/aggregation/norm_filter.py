"""The norm filter: Gupta and Vaidya, "Byzantine Fault Tolerant Distributed Linear Regression", arXiv 1903.08752, 2019
(norm filtering), with a limit that follows the cohort."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import ClassVar

from torch import Tensor

from fastsam.fed.aggregation.base import RobustAggregator, norms
from fastsam.fed.common.checks import number


@dataclass(frozen=True)
class NormFilter(RobustAggregator):
    """The mean over the clients whose delta is not far longer than the others.

        rejected: ||Delta_i|| > factor * median_j ||Delta_j||

    The paper rejects the f longest deltas of every round and needs to know f. This rule rejects deltas beyond a
    multiple of the median. In an ordinary round no delta is that long, so the rule is then the mean with the run's
    weights and costs no accuracy on heterogeneous clients. A client that stays moves the mean by at most factor/n
    medians. Long deltas are rejected and not clipped, because a clipped delta keeps its meaningless direction.
    (`fed.Privacy(clip=)` clips at a length that the user knows.) The rule sees only lengths: a client that sends a
    wrong direction of the usual length stays. Memory: the rows of the round. Time: one more read of them.
    """

    name: ClassVar[str] = "norm_filter"
    supports_weights: ClassVar[bool] = True

    factor: float = 10.0

    def __post_init__(self) -> None:
        number("factor", self.factor, at_least=1)

    def select(self, displacements: Sequence[Tensor]) -> list[int]:
        lengths = norms(displacements)
        limit = self.factor * median(lengths)
        return [i for i, length in enumerate(lengths) if length <= limit]
