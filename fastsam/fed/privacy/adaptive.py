"""A clip that follows a quantile of the displacements' norms: Andrew, Thakkar, McMahan and Ramaswamy, "Differentially
Private Learning with Adaptive Clipping", NeurIPS 2021 (Algorithm 1).

    b    = (sum over the round of (1[||Delta_i|| <= C] - 1/2) + N(0, s_b^2)) / cohort + 1/2
    C   <- C * exp(-0.2 * (b - quantile))
    z'   = (z^-2 - (2 s_b)^-2)^(-1/2)        noise multiplier of the sum, so that sum and count together cost what z
    costs

s_b is a twentieth of the cohort as in the paper, at least z (our choice: a small cohort would else have nothing left
for the sum).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

RATE = 0.2
_SHARE = 20


@dataclass(frozen=True)
class Quantile:
    """quantile: of the norms, in (0, 1]. z: noise multiplier of the run. cohort: clients that are expected in a
    round."""

    quantile: float
    z: float
    cohort: float

    @property
    def count_noise(self) -> float:
        """Standard deviation of the noise on the count."""
        return max(self.cohort / _SHARE, self.z)

    @property
    def sum_multiplier(self) -> float:
        """Noise multiplier of the sum."""
        return (self.z**-2 - (2 * self.count_noise) ** -2) ** -0.5

    def next_clip(self, clip: float, short: float, clients: int, normal: float) -> float:
        """The clip of the next round. short: how many of so many clients were not longer than `clip`; normal: a
        standard normal number."""
        share = (short - clients / 2 + self.count_noise * normal) / self.cohort + 1 / 2
        return clip * math.exp(-RATE * (share - self.quantile))
