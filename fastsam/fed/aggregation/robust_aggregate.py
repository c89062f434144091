"""The sums of a round under a robust rule: what the server's step reads in place of the plain ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

from torch import Tensor

from fastsam.fed.aggregation.base import Rule
from fastsam.fed.sums.fixed_point import FixedPointAggregate


class RobustAggregate:
    """The means are the rule's, over the rows of all clients, which are kept until the round ends; clients and numbers
    are those of the plain
    sums: of all that were not excluded, those that the rule left out too.
    """

    def __init__(self, aggregate: FixedPointAggregate, rule: Rule) -> None:
        self.rule, self._aggregate = rule, aggregate
        self._kept: dict[int, tuple[int, Tensor, dict[str, Tensor]]] = {}

    def keep(
        self,
        clients: Sequence[int],
        weights: Sequence[int],
        places: Sequence[int],
        displacements: Tensor,
        mean: Mapping[str, Tensor],
    ) -> None:
        """The rows at some places, those of clients that are not excluded: displacements `[n, row_size]`, uploads
        `[n, ...]`. They are not copied."""
        for place in places:
            rows = {name: x[place].detach() for name, x in mean.items()}
            self._kept[clients[place]] = weights[place], displacements[place].detach(), rows

    @property
    def num_clients(self) -> int:
        """See `Aggregate`."""
        return self._aggregate.num_clients

    def mean(self, name: str) -> Tensor:
        """The rule's, float64. Raises KeyError for a name nobody sent."""
        self._aggregate.mean(name)  # which says what was sent
        chosen = [self._kept[i] for i in self._chosen if name in self._kept[i][2]]
        return self.rule.mean([rows[name] for _, _, rows in chosen], [weight for weight, _, _ in chosen])

    def sum(self, name: str) -> Tensor:
        """See `Aggregate`."""
        return self._aggregate.sum(name)

    def scalar(self, name: str) -> float:
        """See `Aggregate`."""
        return self._aggregate.scalar(name)

    @cached_property
    def _chosen(self) -> list[int]:
        """Whose rows count, once all are there; in the order of their numbers."""
        order = sorted(self._kept)
        return [order[place] for place in self.rule.chosen([self._kept[i][1] for i in order])]

    @property
    def left_out(self) -> list[int]:
        """Whom the rule left out."""
        return sorted(self._kept.keys() - set(self._chosen))
