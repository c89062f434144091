"""The coordinate median: Yin, Chen, Ramchandran and Bartlett, "Byzantine-Robust Distributed Learning: Towards Optimal
Statistical Rates", ICML 2018 (Definition 1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fastsam.fed.aggregation.base import Rule, middle


@dataclass(frozen=True)
class Median(Rule):
    """In every element by itself

        Delta_j = median_i (Delta_i)_j,    of an even number the mean of the two in the middle

    Whatever fewer than half of the clients send, every element stays within what the others sent. It is no mean: on
    heterogeneous clients it is biased towards what most of them have in common. One client counts like another, so
    there are no weights.
    Memory: the rows of the round. Time: a sort of n numbers per element.
    """

    name: ClassVar[str] = "median"

    def mean(self, rows: Sequence[Tensor], weights: Sequence[int]) -> Tensor:
        return middle(rows, (len(rows) - 1) // 2)
