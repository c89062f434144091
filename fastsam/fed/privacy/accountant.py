"""Epsilon of the rounds so far, by Google's package `dp-accounting`.

This module chooses the event of the package for a round, by the sampler and by the place of the noise. The package
computes the cost of an event.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from fastsam.fed.clients import sampling

_AT_ONCE = 64  # rounds whose epsilon is computed together: by itself, what is in no cache takes several times as long
_AT = 16.0  # a value of a curve at which epsilon is above zero
Events = list[tuple[Any, int]]  # events of dp_accounting with their counts

NEIGHBOURS = {
    "ADD_OR_REMOVE_ONE": "one client is there or not",
    "REPLACE_ONE": "one client has other data",
    "REPLACE_SPECIAL": "one client's displacements are zero or not",
}


@dataclass(frozen=True)
class PrivacyEvents:
    """The events of a run, for the accountant.

    Attributes:
        relation: name in `dp_accounting.NeighboringRelation` of the relation between two indistinguishable sets of
            clients.
        events: function that returns the events of a number of rounds.
    """

    relation: str
    events: Callable[[int], Events]


def privacy_events(
    noise: str,
    sampler: str,
    participation: float,
    clients: int,
    z: float,
    max_participations: Callable[[int], int] | None = None,
) -> PrivacyEvents:
    """Return the privacy events of a run with noise multiplier z, "central" or "local" noise, and `participation` of
    the `clients`.

    A replaced client moves the sum by twice the clip, and `REPLACE_ONE` counts the noise in units of that movement: z /
    2. `max_participations` returns the largest number of the first rounds in which one client took part, for local
    noise.
    """
    import dp_accounting as dp

    if noise == "local":  # the server sees each displacement by itself, and whose it is: no sampling hides a client
        assert max_participations is not None
        return PrivacyEvents("REPLACE_ONE", lambda rounds: [(dp.GaussianDpEvent(z / 2), max_participations(rounds))])
    epoch = sampling.epoch(participation, clients)
    gaussian_event = dp.GaussianDpEvent(z)
    if sampler == "shuffled":
        return PrivacyEvents("REPLACE_SPECIAL", lambda rounds: [(gaussian_event, -(-rounds // epoch))])
    cohort = sampling.fixed_size(participation, clients)
    if sampler == "fixed" and cohort < clients:
        event = dp.SampledWithoutReplacementDpEvent(clients, cohort, dp.GaussianDpEvent(z / 2))
        return PrivacyEvents("REPLACE_ONE", lambda rounds: [(event, rounds)])
    if sampler == "bernoulli" and participation < 1:
        poisson = dp.PoissonSampledDpEvent(participation, gaussian_event)
        return PrivacyEvents("ADD_OR_REMOVE_ONE", lambda rounds: [(poisson, rounds)])
    return PrivacyEvents("ADD_OR_REMOVE_ONE", lambda rounds: [(gaussian_event, rounds)])


class Accountant:
    """Epsilon by Renyi differential privacy: the curve of an event is computed once, and curves of rounds are added."""

    def __init__(self, run_events: PrivacyEvents, delta: float) -> None:
        import dp_accounting as dp

        self.run_events, self.delta = run_events, delta
        self._relation = dp.NeighboringRelation[run_events.relation]
        self._orders = dp.rdp.RdpAccountant(neighboring_relation=self._relation).orders
        self._curves: dict[Any, np.ndarray] = {}
        self._epsilon_by_round: dict[int, float] = {}
        # Terms that the package adds to a curve at each order. They are read once, at a value without other terms,
        # because it takes as long as a small round.
        terms = [dp.rdp.compute_epsilon([order], [_AT], delta)[0] - _AT for order in self._orders.tolist()]
        self._order_terms = np.array(terms)
        self._small = -math.log1p(-(delta**2))  # a curve below this value has a different bound

    def epsilon(self, rounds: int) -> float:
        """Return epsilon of the first `rounds` >= 1 rounds, as `dp_accounting.rdp.RdpAccountant` computes it."""
        if rounds not in self._epsilon_by_round:
            several = range(rounds, rounds + min(rounds, _AT_ONCE))  # a short run computes at most twice its rounds
            self._epsilon_by_round = dict(zip(several, self._epsilons(several), strict=True))
        return self._epsilon_by_round[rounds]

    def _epsilons(self, several: range) -> list[float]:
        """Return epsilon for each of some numbers of rounds."""
        import dp_accounting as dp

        curves = np.zeros((len(several), len(self._orders)))
        for curve, rounds in zip(curves, several, strict=True):
            for event, times in self.run_events.events(rounds):
                if times:
                    curve += times * self._curve(event)
        epsilons = (curves + self._order_terms).min(1).clip(min=0.0)
        for place in np.flatnonzero(curves.min(1) <= self._small):
            epsilons[place] = dp.rdp.compute_epsilon(self._orders, curves[place], self.delta)[0]
        return epsilons.tolist()

    def _curve(self, event: Any) -> np.ndarray:
        curve = self._curves.get(event)
        if curve is None:
            import dp_accounting as dp

            with _without_warnings():
                accountant = dp.rdp.RdpAccountant(neighboring_relation=self._relation).compose(event)
            curve = self._curves[event] = accountant.rdp
        return curve


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Silence warnings about orders whose curve does not converge; another order gives epsilon."""
    log = logging.getLogger("absl")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)


class ParticipationCounter:
    """Counter of the rounds in which clients took part. `draw` returns the clients of a round, the same in every
    call."""

    def __init__(self, draw: Callable[[int], Sequence[int]]) -> None:
        self._draw = draw
        self._counts: Counter[int] = Counter()
        self._rounds = 0

    def max_participations(self, rounds: int) -> int:
        """Return the largest number of the first rounds in which one client took part."""
        if rounds < self._rounds:
            self._counts.clear()
            self._rounds = 0
        for t in range(self._rounds, rounds):
            self._counts.update(self._draw(t))
        self._rounds = rounds
        return max(self._counts.values())
