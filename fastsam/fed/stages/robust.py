"""A robust rule in place of the weighted mean (`aggregation=`), and which algorithms it serves."""

from __future__ import annotations

from functools import cached_property

from torch import Tensor

from fastsam.fed.aggregation import RobustAggregator
from fastsam.fed.algorithms.base import Aggregate, Round, State
from fastsam.fed.stages.base import ClientUploads, Stage
from fastsam.fed.sums.fixed_point import FixedPointAggregate, Problems

DELTA = "delta"


class Robust(Stage):
    """Keep the rows of the round's clients, and let a rule make the means of them. `algorithm` is a name for
    messages."""

    def __init__(self, rule: RobustAggregator, algorithm: str) -> None:
        self.rule, self.algorithm = rule, algorithm
        self.aggregate: RobustAggregate | None = None

    def begin_round(self, sums: FixedPointAggregate) -> None:
        """Forget the rows of the last round."""
        self.aggregate = RobustAggregate(sums, self.rule)

    def process_uploads(self, uploads: ClientUploads, round: Round) -> None:
        """Raise ValueError if there are plain sums, which a rule cannot replace."""
        if uploads.sum:
            raise ValueError(
                f"aggregation={self.rule.name!r} needs a server that reads only means, but finish of "
                f"{self.algorithm} returned Upload(sum=...). Use aggregation='mean', and say uses_sums = True in its "
                "class"
            )

    def after_sum(self, uploads: ClientUploads, problems: Problems) -> None:
        """Keep the rows that entered the sums."""
        assert self.aggregate is not None
        self.aggregate.keep(uploads, problems)

    def process_aggregate(self, aggregate: Aggregate | None, server: State, round: Round) -> Aggregate | None:
        """Return the aggregate whose means are the rule's."""
        return None if aggregate is None else self.aggregate

    def record(self, round: Round) -> dict[str, list[int]]:
        """Return the clients that the rule rejected."""
        if self.aggregate is None or self.rule.only_deltas:
            return {}
        return {"left_out": self.aggregate.rejected_clients}


class RobustAggregate:
    """The aggregate of a round whose means are made by a rule.

    Sums, scalars and the number of clients are over all clients that were not excluded.
    """

    def __init__(self, sums: FixedPointAggregate, rule: RobustAggregator) -> None:
        self.rule, self._sums = rule, sums
        self._rows: dict[int, tuple[int, Tensor, dict[str, Tensor]]] = {}  # by client: weight, delta, uploads
        self._means: dict[str, Tensor] = {}

    def keep(self, uploads: ClientUploads, problems: Problems) -> None:
        """Keep the rows of clients without a problem. They are not copied."""
        for i, client in enumerate(uploads.results.client_ids):
            if i not in problems:
                rows = {name: x[i].detach() for name, x in uploads.mean.items()}
                self._rows[client] = uploads.weights[i], uploads.results.delta[i].detach(), rows

    @property
    def num_clients(self) -> int:
        return self._sums.num_clients

    def mean(self, name: str) -> Tensor:
        """Return the rule's mean, float64. Raises KeyError for a name that no client sent."""
        mean = self._sums.mean(name)  # raises KeyError with the names that were sent
        if self.rule.only_deltas and name != DELTA:
            return mean
        if name not in self._means:
            self._means[name] = self._mean(name)
        return self._means[name]

    def _mean(self, name: str) -> Tensor:
        kept_rows = [self._rows[i] for i in self._selected_clients if name in self._rows[i][2]]
        return self.rule.mean([rows[name] for _, _, rows in kept_rows], [weight for weight, _, _ in kept_rows])

    def sum(self, name: str) -> Tensor:
        return self._sums.sum(name)

    def scalar(self, name: str) -> float:
        return self._sums.scalar(name)

    @cached_property
    def _selected_clients(self) -> list[int]:
        """The clients whose rows count, in ascending order."""
        order = sorted(self._rows)
        return [order[i] for i in self.rule.select([self._rows[client][1] for client in order])]

    @property
    def rejected_clients(self) -> list[int]:
        """The clients that the rule rejected."""
        return sorted(self._rows.keys() - set(self._selected_clients))
