"""The interface of a stage: one thing that a run does between the local work of its clients and the server's step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fastsam.fed.algorithms.base import Aggregate, Round, State
from fastsam.fed.sums.fixed_point import FixedPointAggregate, Problems
from fastsam.fed.sums.ranks import Ranks
from fastsam.fed.update.model_copy import Replica
from fastsam.fed.update.results import ClientResults
from fastsam.fed.update.steps import Step


@dataclass
class ClientUploads:
    """The uploads of n clients on their way to the sums. Stages change it in place.

    Args:
        server: the server's state at the start of the round.
        results: the results of the n clients.
        client: the states of the n clients at the start of the round, rows `[n, ...]`.
        state: their new states. A stage may add an entry under its own name.
        mean: rows `[n, ...]` for the weighted means, by name.
        sum: rows `[n, ...]` for the plain sums, by name.
        scalars: n numbers under each name, for plain sums.
        own_weights: the weights that the algorithm sends, float64 `[n]`, or None.
        weights: the run's weights of the n clients.
    """

    server: State
    results: ClientResults
    client: State
    state: State
    mean: dict[str, Tensor]
    sum: Mapping[str, Tensor]
    scalars: dict[str, Sequence[float]]
    own_weights: Tensor | None
    weights: Sequence[int]


class Stage:
    """A stage of a run's chain. Each method does nothing unless a subclass overrides it.

    In a round, the methods of all stages are called in the chain's order. `keeps_empty_rounds` is True if a round in
    which no client was sampled still has a server step.
    """

    keeps_empty_rounds: bool = False

    def visible_round(self, round: Round) -> Round:
        """Return the round as the algorithm may see it."""
        return round

    def begin_round(self, sums: FixedPointAggregate) -> None:
        """Begin a round with clients. `sums` will hold the sums of their uploads."""

    def process_step(self, step: Step, client: State) -> Step:
        """Return the local step of n clients, whose states are `client`, `[n, ...]`."""
        return step

    def snapshots(self, round: Round, num_steps: int) -> Iterable[int]:
        """Return the local steps of a client before which its row is copied for this stage."""
        return ()

    def process_results(self, results: ClientResults, round: Round) -> list[float] | None:
        """Change the deltas of n clients in place; return the n norms of the deltas if the stage knows them."""

    def process_uploads(self, uploads: ClientUploads, round: Round) -> None:
        """Change what n clients send, in place."""

    def after_sum(self, uploads: ClientUploads, problems: Problems) -> None:
        """Read the uploads that have entered the sums. `problems` has the indices of the clients that have not."""

    def end_round(self, ranks: Ranks, round: Round) -> None:
        """Exchange with the other ranks what this stage keeps; collective, with more than one rank only."""

    def process_aggregate(self, aggregate: Aggregate | None, server: State, round: Round) -> Aggregate | None:
        """Return what the following stages and the server read; `aggregate` is None if no client was sampled."""
        return aggregate

    def process_buffers(self, buffers: list[Tensor], aggregate: Aggregate) -> list[Tensor]:
        """Return the global model's buffers after the round."""
        return buffers

    def record(self, round: Round) -> dict[str, Any]:
        """Return what the round's record says of this stage."""
        return {}

    def measure(
        self, old_state: State, new_state: State, buffers: list[Tensor], round: Round, reserved_names: Iterable[str]
    ) -> dict[str, Any]:
        """Return measurements for the round's record, from the server's states; `reserved_names` are taken."""
        return {}

    def traffic(self, model: Replica) -> tuple[int, int]:
        """Return the bytes that this stage adds to a client's download and upload; they may be negative."""
        return 0, 0

    def summary(self) -> dict[str, Any]:
        """Return what the summary of the run says of this stage."""
        return {}
