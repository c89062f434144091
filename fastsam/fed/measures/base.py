"""The interface of measures, which a run calls in every round."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from torch import Tensor

from fastsam.fed.algorithms.base import Aggregate, Round, State
from fastsam.fed.step.local_update import ClientResults


class Measures(Protocol):
    """Measures of a run. A user's measures get vectors `[..., P]` in torch's order (`fastsam.fed.measures.own`).

    Numbers of clients are added to the round's sums in any order. Numbers of rounds enter the records.

    With several ranks each rank has its own object: `clients` is called where clients trained, `round` on rank 0. An
    object that keeps more than numbers has a method `join(ranks, about)`, which is called on all ranks between the two.
    """

    def snapshots(self, round: int, steps: int) -> tuple[int, ...]:
        """The local steps (from 0) before which a row is kept (`ClientResults.snapshots`), for a client that takes
        `steps` of them."""

    def clients(self, before: State, results: ClientResults, about: Round) -> Mapping[str, Sequence[float] | Tensor]:
        """Numbers of n clients, n under each name; their sums over all clients are `aggregate.scalar(name)` in `round`.

        A number that is not finite excludes its client.
        """

    def round(self, before: State, after: State, aggregate: Aggregate, about: Round) -> dict[str, float | None]:
        """Return numbers for the round's record, from the server's states before and after the round, and the
        aggregate."""
