"""Who takes part in a round.

A sampler is a callable `(round, generator) -> client ids`: `round` counts from 0, `generator` is a `torch.Generator`
that depends on (seed, round) alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from fastsam.fed.common import seeds
from fastsam.fed.common.checks import integer, number

Sampler = Callable[[int, torch.Generator], Iterable[Any]]
Available = Callable[[int], Any]  # from a round (from 0) to client ids, or a mask of all clients
NAMES = ("bernoulli", "fixed", "shuffled", "simulator")

_MAX_REDRAWS, _SIMULATOR_SEED = 100, 20


def make(sampler: str | Sampler | None, clients: int, participation: float, redraws: bool = True) -> Sampler:
    """The sampler of that name over `clients` clients, or the callable itself (`participation` has no meaning for it).

    "bernoulli": every client takes part with probability `participation`, independently; drawn again while nobody does
    (Qu et al. 2022), unless `redraws` is false.
    "fixed": exactly `participation * clients` of them (rounded, one at least), without replacement.
    "shuffled": all clients in a random order, so many a round (of the last round what is left), then all of them in a
    new one. "simulator": that of FL-Simulator and FedLESAM's code, to repeat their cohorts: numpy's old generator with
    the seed `20 + round`, and the next seed while nobody takes part. The run's seed has no part in it.
    Raises ValueError for another name and for a participation outside (0, 1].
    """
    if callable(sampler):
        return sampler
    if not isinstance(sampler, str) or sampler not in NAMES:
        raise ValueError(
            f"sampler must be {', '.join(map(repr, NAMES))} or a callable (round, generator) -> client ids, got "
            f"{sampler!r}"
        )
    ratio = number("participation", participation, above=0, at_most=1)

    def bernoulli(round: int, generator: torch.Generator) -> list[int]:
        for _ in range(_MAX_REDRAWS):
            u = torch.rand(clients, generator=generator, dtype=torch.float64)
            if (u < ratio).any() or not redraws:
                return torch.nonzero(u < ratio).flatten().tolist()
        # Where the participation is so small that this is reached, one client alone is what redrawing would end with.
        return [int(u.argmin())]

    def fixed(round: int, generator: torch.Generator) -> list[int]:
        return torch.randperm(clients, generator=generator)[: fixed_size(ratio, clients)].tolist()

    def simulator(round: int, generator: torch.Generator) -> list[int]:
        for redraw in range(_MAX_REDRAWS):
            u = np.random.RandomState(_SIMULATOR_SEED + round + redraw).uniform(size=clients)
            if (u <= ratio).any():
                break
        return np.flatnonzero(u <= ratio).tolist() or [int(u.argmin())]

    shuffled = Shuffled(clients, fixed_size(ratio, clients))
    made: dict[str, Sampler] = {"bernoulli": bernoulli, "fixed": fixed, "shuffled": shuffled, "simulator": simulator}
    return made[sampler]


@dataclass(frozen=True)
class Shuffled:
    """Everybody once, in a random order, before anybody takes part again. size: of a cohort."""

    clients: int
    size: int

    def __call__(self, round: int, generator: torch.Generator) -> list[int]:
        """generator: the same in all rounds of an epoch."""
        at = round % self.epoch * self.size
        return torch.randperm(self.clients, generator=generator)[at : at + self.size].tolist()

    @property
    def epoch(self) -> int:
        """Rounds in which everybody takes part once."""
        return -(-self.clients // self.size)


def fixed_size(participation: float, clients: int) -> int:
    """Clients in a round of "fixed" and "shuffled"."""
    return max(1, int(participation * clients + 0.5))


def epoch(participation: float, clients: int) -> int:
    """Rounds in which "shuffled" has everybody once."""
    return Shuffled(clients, fixed_size(participation, clients)).epoch


def expected(sampler: str | Sampler, participation: float, clients: int) -> float | None:
    """How many clients a round has on average, by its sampler alone; None where that cannot be said."""
    if sampler == "bernoulli":
        return participation * clients
    return float(fixed_size(participation, clients)) if sampler in ("fixed", "shuffled") else None


def draw(sampler: Sampler, round: int, clients: int, seed: int, nobody: bool = False) -> list[int]:
    """The active clients of a round in ascending order. Raises ValueError for what a sampler must not return, and,
    unless `nobody` is true, for nobody."""
    first = round - round % (sampler.epoch if isinstance(sampler, Shuffled) else 1)
    ids = sampler(round, seeds.generator(seed, "sample", first))
    try:
        given = ids.tolist() if hasattr(ids, "tolist") else list(ids)
        chosen = given if set(map(type, given)) == {int} else [integer("a client id", i) for i in given]
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"the sampler must return client ids, integers from 0 to {clients - 1}; in round {round + 1} it returned "
            f"{ids!r}"
        ) from error
    ordered = sorted(chosen)
    if not ordered and nobody:
        return ordered
    if not ordered or ordered[0] < 0 or ordered[-1] >= clients or len(set(ordered)) != len(ordered):
        wrong = [i for i in chosen if not 0 <= i < clients]
        what = f"{wrong[0]}, which is no client" if wrong else "a client twice" if chosen else "nobody"
        raise ValueError(
            f"the sampler must return different client ids from 0 to {clients - 1}, one at least; in round {round + 1} "
            f"it returned {what}"
        )
    return ordered


def check_available(available: Any, sampler: str | Sampler | None) -> None:
    """Raises ValueError unless it is a function, beside a sampler that it can tell whom to draw from; or None."""
    if available is None:
        return
    if not callable(available):
        raise ValueError(
            f"available must be a function of the round that returns client ids or a mask (in a config its import "
            f"path), got {available!r}"
        )
    if sampler not in ("bernoulli", "fixed"):
        raise ValueError(
            f"available says among whom sampler='bernoulli' or 'fixed' draws; sampler={sampler!r} chooses by itself, "
            f"use one of them"
        )


def present(available: Available, round: int, clients: int) -> list[int]:
    """Who can take part in a round, in ascending order; perhaps nobody. Raises ValueError for what is neither ids nor a
    mask."""
    try:
        found = available(round)
        given = found.tolist() if hasattr(found, "tolist") else list(found)
        mask = bool(given) and set(map(type, given)) == {bool}
        if mask and len(given) != clients:
            raise ValueError(f"a mask of {len(given)}")
        ids = (
            [i for i, here in enumerate(given) if here] if mask else sorted({integer("a client id", i) for i in given})
        )
        if ids and not 0 <= ids[0] <= ids[-1] < clients:
            raise ValueError(f"{ids[0] if ids[0] < 0 else ids[-1]} is no client")
    except Exception as error:
        kind = "" if type(error) is ValueError else f"{type(error).__name__}: "
        raise ValueError(
            f"available must return client ids from 0 to {clients - 1}, or a mask of {clients} booleans; in round "
            f"{round + 1}: {kind}{error}"
        ) from error
    return ids


def draw_present(
    sampler: str, share_of: Callable[[int], float], available: Available, round: int, clients: int, seed: int
) -> list[int]:
    """Draw from the clients that can take part in the round, as `draw` does from all; return none if none can.

    share_of: the share of so many clients that takes part.
    """
    here = present(available, round, clients)
    if not here:
        return []
    return [here[i] for i in draw(make(sampler, len(here), share_of(len(here))), round, len(here), seed)]


def likely(sampler: str | Sampler | None, clients: int, participation: float) -> int:
    """How many clients a round has at most, in all but a few rounds: all of them for a callable."""
    if callable(sampler):
        return clients
    mean = participation * clients
    spread = 0.0 if sampler in ("fixed", "shuffled") else 2 * (mean * (1 - participation)) ** 0.5
    return max(1, min(clients, round(mean + spread)))
