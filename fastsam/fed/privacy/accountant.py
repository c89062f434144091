"""Epsilon of the rounds that are done, by Google's package `dp-accounting`: which of its events a round is, by who takes part and who adds
the noise. The package knows what an event costs; what is decided here is which one a sampler's rounds are.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from fastsam.fed.clients import sampling

Events = list[tuple[Any, int]]  # of dp_accounting, and how often

NEIGHBOURS = {
    "ADD_OR_REMOVE_ONE": "one client is there or not",
    "REPLACE_ONE": "one client has other data",
    "REPLACE_SPECIAL": "one client's displacements are zero or not",
}


@dataclass(frozen=True)
class Law:
    """relation: between the two sets of clients that cannot be told apart, by its name in `dp_accounting.NeighboringRelation`.

    events: of so many rounds.
    """

    relation: str
    events: Callable[[int], Events]


def law(
    noise: str, sampler: str, participation: float, clients: int, z: float, most: Callable[[int], int] | None = None
) -> Law:
    """That of a run with noise multiplier z.

    most: in how many of the first rounds the client took part that took part most often; of noise that the clients add.

    A client that is replaced by another one moves the sum by twice the clip, and `REPLACE_ONE` takes the noise over that: z / 2.
    """
    import dp_accounting as dp

    if noise == "local":  # the server sees each displacement by itself, and whose it is: no sampling hides a client
        assert most is not None
        return Law("REPLACE_ONE", lambda rounds: [(dp.GaussianDpEvent(z / 2), most(rounds))])
    epoch = sampling.epoch(participation, clients)
    if noise == "tree":

        def trees(rounds: int) -> Events:
            whole, rest = divmod(rounds, epoch)
            last = [(dp.SingleEpochTreeAggregationDpEvent(z, rest), 1)] if rest else []
            return [(dp.SingleEpochTreeAggregationDpEvent(z, epoch), whole), *last]

        return Law("REPLACE_SPECIAL", trees)
    every = dp.GaussianDpEvent(z)
    if sampler == "shuffled":
        return Law("REPLACE_SPECIAL", lambda rounds: [(every, -(-rounds // epoch))])
    cohort = sampling.fixed_size(participation, clients)
    if sampler == "fixed" and cohort < clients:
        some = dp.SampledWithoutReplacementDpEvent(clients, cohort, dp.GaussianDpEvent(z / 2))
        return Law("REPLACE_ONE", lambda rounds: [(some, rounds)])
    if sampler == "bernoulli" and participation < 1:
        poisson = dp.PoissonSampledDpEvent(participation, every)
        return Law("ADD_OR_REMOVE_ONE", lambda rounds: [(poisson, rounds)])
    return Law("ADD_OR_REMOVE_ONE", lambda rounds: [(every, rounds)])


class Accountant:
    """Epsilon by Renyi differential privacy: the curve of an event is computed once, and curves of rounds are added."""

    def __init__(self, law: Law, delta: float) -> None:
        import dp_accounting as dp

        self.law, self.delta = law, delta
        self._relation = dp.NeighboringRelation[law.relation]
        self._orders: list[float] = dp.rdp.RdpAccountant(neighboring_relation=self._relation).orders.tolist()
        self._curves: dict[Any, list[float]] = {}
        self._last = (
            0,
            len(self._orders),
        )  # rounds that were asked for, and how many orders need to be looked at from there on

    def epsilon(self, rounds: int) -> float:
        """Of the first `rounds` rounds together, rounds >= 1: what `dp_accounting.rdp.RdpAccountant` has for their events.

        The order that gives the least epsilon never rises from round to round, for curves rise with the order: those above it are left out.
        """
        import dp_accounting as dp

        before, count = self._last
        if rounds < before:
            count = len(self._orders)
        curves = [(self._curve(event), times) for event, times in self.law.events(rounds) if times]
        rdp = [sum(times * curve[i] for curve, times in curves) for i in range(count)]
        epsilon, order = dp.rdp.compute_epsilon(self._orders[:count], rdp, self.delta)
        if epsilon > 0:  # at 0 any order will do, and none is the best
            count = self._orders.index(order) + 1
        self._last = rounds, count
        return float(epsilon)

    def _curve(self, event: Any) -> list[float]:
        found = self._curves.get(event)
        if found is None:
            import dp_accounting as dp

            with _without_warnings():
                made = dp.rdp.RdpAccountant(neighboring_relation=self._relation).compose(event)
            found = self._curves[event] = made.rdp.tolist()
        return found


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Of orders whose curve does not converge: they are infinite in it, and another one gives the least epsilon."""
    log = logging.getLogger("absl")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)


class Participations:
    """How often clients took part. draw: who takes part in a round, as often as it is asked."""

    def __init__(self, draw: Callable[[int], Sequence[int]]) -> None:
        self._draw = draw
        self._counts: Counter[int] = Counter()
        self._rounds = 0

    def most(self, rounds: int) -> int:
        """In how many of the first rounds the client took part that took part most often."""
        if rounds < self._rounds:
            self._counts.clear()
            self._rounds = 0
        for t in range(self._rounds, rounds):
            self._counts.update(self._draw(t))
        self._rounds = rounds
        return max(self._counts.values())
