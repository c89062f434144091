"""What a run may be asked to measure in every round, beside accuracy and loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from torch import Tensor

from fastsam.fed.algorithms.base import Aggregate, Round, State
from fastsam.fed.step.local_update import ClientResults


class Measures(Protocol):
    """Measures of a run. Those of a user get vectors `[..., P]` as torch makes them where the run has rows
    (`fastsam.fed.measures.own`).

    A client's numbers are added to the round's sums, whatever the order; the round's go into its record.

    With several ranks each has an object of its own: `clients` is called where they trained, `round` on rank 0. What is
    kept besides the numbers goes there in a method `join(ranks, about)`, called on all ranks between the two, where the
    object has one.
    """

    def snapshots(self, round: int, steps: int) -> tuple[int, ...]:
        """The local steps (from 0) before which a row is kept (`ClientResults.snapshots`), for a client that takes
        `steps` of them."""

    def clients(self, before: State, results: ClientResults, about: Round) -> Mapping[str, Sequence[float] | Tensor]:
        """Numbers of n clients, n under each name; their sums over all clients are `aggregate.scalar(name)` in `round`.

        A number that is not finite excludes its client.
        """

    def round(self, before: State, after: State, aggregate: Aggregate, about: Round) -> dict[str, float | None]:
        """What goes into the round's record, from the server's states before and after, and the sums."""
