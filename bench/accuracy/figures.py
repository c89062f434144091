"""What several seeds say: means, spreads, and differences of runs with the same seed."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

KIND = "fastsam.bench.accuracy/1"  # of a results file


@dataclass(frozen=True)
class Difference:
    """Mean and standard error of paired differences."""

    mean: float
    error: float

    @classmethod
    def of(cls, values: Sequence[float], others: Sequence[float]) -> Difference:
        """Of `values[i] - others[i]`, the runs with seed i. Raises ValueError for fewer than two pairs, and for unequal
        numbers."""
        pairs = [a - b for a, b in zip(values, others, strict=True)]
        if len(pairs) < 2:
            raise ValueError(f"a standard error needs two seeds or more, got {len(pairs)}")
        return cls(statistics.fmean(pairs), statistics.stdev(pairs) / math.sqrt(len(pairs)))

    @classmethod
    def mean_of(cls, several: Sequence[Difference]) -> Difference:
        """Of independent differences, each counted the same."""
        n = len(several)
        return cls(sum(d.mean for d in several) / n, math.sqrt(sum(d.error**2 for d in several)) / n)

    @property
    def verdict(self) -> str:
        """`better`, `worse`, or `no difference shown`: within two standard errors."""
        if abs(self.mean) <= 2 * self.error:
            return "no difference shown"
        return "better" if self.mean > 0 else "worse"


def spread(values: Sequence[float]) -> tuple[float, float]:
    """Mean and sample standard deviation."""
    return statistics.fmean(values), statistics.stdev(values)
