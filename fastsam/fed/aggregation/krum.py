"""Krum and multi-Krum: Blanchard, El Mhamdi, Guerraoui and Stainer, "Machine Learning with Adversaries: Byzantine
Tolerant Gradient Descent", NeurIPS 2017 (section 4)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fastsam.fed.aggregation.base import RobustAggregator, count_of_share
from fastsam.fed.common.checks import number


@dataclass(frozen=True)
class Krum(RobustAggregator):
    """The delta that is nearest to its neighbours.

        score(i) = sum of ||Delta_i - Delta_j||^2 over the n - f - 2 clients j nearest to i,    Delta = Delta_i of the
            least score

    The paper needs 2f + 2 < n, so f is at most (n - 3)/2. If several clients have the least score, the one with the
    smallest id is chosen. All clients but one are rejected, so on heterogeneous clients the model follows one client at
    a time. Memory: the rows of the round. Time: n^2/2 distances, one read of all rows for each client.

    Args:
        share: share of the clients that may send arbitrary values, f = ceil(share * n).
    """

    name: ClassVar[str] = "krum"

    share: float = 0.2

    def __post_init__(self) -> None:
        number("share", self.share, at_least=0, at_most=0.5)

    def select(self, displacements: Sequence[Tensor]) -> list[int]:
        n = len(displacements)
        if n < 3:  # no neighbours to ask
            return list(range(n))
        f = min(count_of_share(self.share, n), (n - 3) // 2)
        neighbours = n - f - 2
        scores = squares(displacements).sort(dim=1).values[:, 1 : 1 + neighbours].sum(1)  # the first is its own, 0
        return sorted(torch.argsort(scores, stable=True)[: self.count(neighbours)].tolist())

    def count(self, neighbours: int) -> int:
        """Return the number of clients that are chosen."""
        return 1


@dataclass(frozen=True)
class MultiKrum(Krum):
    """The mean of the m displacements with the least scores of Krum.

    m = n - f - 2. The paper leaves m open. El Mhamdi, Guerraoui and Rouault ("The Hidden Vulnerability of Distributed
    Learning in Byzantium", ICML 2018) show that Krum's guarantee holds up to this m. Memory and time are as in `Krum`.

    Args:
        share: see `Krum`.
    """

    name: ClassVar[str] = "multi_krum"

    def count(self, neighbours: int) -> int:
        return neighbours


def squares(rows: Sequence[Tensor]) -> Tensor:
    """Return the squared distances of all pairs, float64 `[n, n]` on the CPU."""
    out = torch.zeros(len(rows), len(rows), dtype=torch.float64)
    for i, row in enumerate(rows):
        for j in range(i):
            out[i, j] = out[j, i] = float(torch.linalg.vector_norm(row - rows[j], dtype=torch.float64)) ** 2
    return out
