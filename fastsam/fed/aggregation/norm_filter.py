"""The norm filter: Gupta and Vaidya, "Byzantine Fault Tolerant Distributed Linear Regression", arXiv 1903.08752, 2019
(norm filtering), with a limit that follows the cohort."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import ClassVar

from torch import Tensor

from fastsam.fed.aggregation.base import Rule, norms
from fastsam.fed.common.checks import number


@dataclass(frozen=True)
class NormFilter(Rule):
    """The mean over the clients whose displacement is not far longer than the others'.

        left out: ||Delta_i|| > factor * median_j ||Delta_j||

    The paper leaves out the f longest of every round, f being known. Our choice, for want of an f: those beyond a
    multiple of the median, which hardly anybody is in an ordinary round, so that the rule is then the mean with the
    run's weights, and costs no accuracy on heterogeneous clients; one client of n that stays moves the mean by factor/n
    medians at most. Left out, not cut: a cut vector keeps a direction that means nothing (`fed.Privacy(clip=)` cuts,
    at a length that the user knows). It sees lengths alone: a client that sends a wrong direction of the right length
    stays.
    Memory: the rows of the round. Time: one more read of them.
    """

    name: ClassVar[str] = "norm_filter"
    supports_weights: ClassVar[bool] = True
    chooses: ClassVar[bool] = True

    factor: float = 10.0

    def __post_init__(self) -> None:
        number("factor", self.factor, at_least=1)

    def chosen(self, displacements: Sequence[Tensor]) -> list[int]:
        lengths = norms(displacements)
        limit = self.factor * median(lengths)
        return [i for i, length in enumerate(lengths) if length <= limit]
