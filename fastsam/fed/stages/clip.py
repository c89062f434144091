"""Clipping of the clients' deltas (`fed.Privacy(clip=)`)."""

from __future__ import annotations

from fastsam.fed.algorithms.base import Round
from fastsam.fed.privacy.clip import shorten_
from fastsam.fed.stages.base import Stage
from fastsam.fed.step.local_update import ClientResults


class Clip(Stage):
    """Scale deltas that are longer than `limit` to that norm."""

    def __init__(self, limit: float) -> None:
        self.limit = limit

    def process_results(self, results: ClientResults, round: Round) -> list[float]:
        """Clip the deltas in place and return their norms."""
        return [min(norm, self.limit) for norm in shorten_(results.delta, self.limit)]
