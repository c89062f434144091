"""Sampling of the clients of a round.

A sampler is a callable `(round, generator) -> client ids`. `round` counts from 0. `generator` is a `torch.Generator`
that depends only on (seed, round).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from fastsam.fed.common import seeds
from fastsam.fed.common.checks import integer, number

Sampler = Callable[[int, torch.Generator], Iterable[Any]]
Available = Callable[[int], Any]  # from a round (from 0) to client ids, or a mask of all clients
NAMES = ("bernoulli", "fixed", "shuffled", "simulator")
DEFAULT = "fixed"  # as in the papers: a round has a fixed number of clients

_MAX_REDRAWS, _SIMULATOR_SEED = 100, 20


def make(sampler: str | Sampler | None, clients: int, participation: float, redraws: bool = True) -> Sampler:
    """Return the sampler of that name over `clients` clients, or the callable with a check of the ids that it returns.

    "bernoulli": each client takes part with probability `participation`, independently. If no client does, it is drawn
    again (Qu et al. 2022), unless `redraws` is False. "fixed", a run's default: exactly `participation * clients`
    clients (rounded, at least one), without replacement. "shuffled": all clients in a random order, a cohort each
    round, the rest in the last one; then a new order. "simulator": the sampler of FL-Simulator and of FedLESAM's code,
    to repeat their cohorts. It uses numpy's old generator with the seed `20 + round`, and the next seed while no client
    takes part. The run's seed has no effect.

    Raises:
        ValueError: the name is unknown, or the participation is not in (0, 1].
    """
    if callable(sampler):
        return partial(_call_sampler, sampler, clients)
    if not isinstance(sampler, str) or sampler not in NAMES:
        raise ValueError(
            f"sampler must be {', '.join(map(repr, NAMES))} or a callable (round, generator) -> client ids, got "
            f"{sampler!r}"
        )
    ratio = number("participation", participation, greater_than=0, at_most=1)

    def bernoulli(round: int, generator: torch.Generator) -> list[int]:
        for _ in range(_MAX_REDRAWS):
            u = torch.rand(clients, generator=generator, dtype=torch.float64)
            if (u < ratio).any() or not redraws:
                return torch.nonzero(u < ratio).flatten().tolist()
        # With so small a participation, redrawing would end with a single client.
        return [int(u.argmin())]

    def draw_fixed(round: int, generator: torch.Generator) -> list[int]:
        return torch.randperm(clients, generator=generator)[: fixed_size(ratio, clients)].tolist()

    def simulator(round: int, generator: torch.Generator) -> list[int]:
        for redraw in range(_MAX_REDRAWS):
            u = np.random.RandomState(_SIMULATOR_SEED + round + redraw).uniform(size=clients)
            if (u <= ratio).any():
                break
        return np.flatnonzero(u <= ratio).tolist() or [int(u.argmin())]

    shuffler = Shuffled(clients, fixed_size(ratio, clients))
    samplers: dict[str, Sampler] = {
        "bernoulli": bernoulli,
        "fixed": draw_fixed,
        "shuffled": shuffler,
        "simulator": simulator,
    }
    return samplers[sampler]


@dataclass(frozen=True)
class Shuffled:
    """The sampler that takes all clients once, in a random order, before a client takes part again."""

    clients: int
    size: int

    def __call__(self, round: int, generator: torch.Generator) -> list[int]:
        """Return the clients of a round. `generator` must be the same in all rounds of an epoch."""
        offset = round % self.epoch * self.size
        return torch.randperm(self.clients, generator=generator)[offset : offset + self.size].tolist()

    @property
    def epoch(self) -> int:
        """Number of rounds in which every client takes part once."""
        return -(-self.clients // self.size)


def fixed_size(participation: float, clients: int) -> int:
    """Return the number of clients in a round of "fixed" and "shuffled"."""
    return max(1, int(participation * clients + 0.5))


def epoch(participation: float, clients: int) -> int:
    """Return the number of rounds in which "shuffled" takes every client once."""
    return Shuffled(clients, fixed_size(participation, clients)).epoch


def expected_size(sampler: str | Sampler, participation: float, clients: int) -> float | None:
    """Return the average number of clients of a round, or None if the sampler does not determine it."""
    if sampler == "bernoulli":
        return participation * clients
    return float(fixed_size(participation, clients)) if sampler in ("fixed", "shuffled") else None


def draw(sampler: Sampler, round: int, seed: int) -> list[int]:
    """Return the clients of a round in ascending order, by a sampler of `make`."""
    first = round - round % (sampler.epoch if isinstance(sampler, Shuffled) else 1)
    return sorted(sampler(round, seeds.generator(seed, "sample", first)))


def _call_sampler(sampler: Sampler, clients: int, round: int, generator: torch.Generator) -> list[int]:
    """Return the ids that a user's sampler returns. Raises ValueError unless they are ids of different clients."""
    ids: Any = sampler(round, generator)
    try:
        values = ids.tolist() if hasattr(ids, "tolist") else list(ids)
        client_ids = values if set(map(type, values)) == {int} else [integer("a client id", i) for i in values]
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"the sampler must return client ids, integers from 0 to {clients - 1}; in round {round + 1} it returned "
            f"{ids!r}"
        ) from error
    wrong = [i for i in client_ids if not 0 <= i < clients]
    if wrong or not client_ids or len(set(client_ids)) != len(client_ids):
        problem = f"{wrong[0]}, which is not a client" if wrong else "a client twice" if client_ids else "no client"
        raise ValueError(
            f"the sampler must return at least one client id, and only different ids from 0 to {clients - 1}; in "
            f"round {round + 1} it returned {problem}"
        )
    return client_ids


def check_available(available: Any, sampler: str | Sampler | None) -> None:
    """Raise ValueError unless `available` is None, or a function or mask next to a sampler that can use it."""
    if available is None:
        return
    if not callable(available):
        raise ValueError(
            f"available must be a function of the round that returns client ids or a mask (in a config its import "
            f"path), got {available!r}"
        )
    if sampler not in (None, "bernoulli", "fixed"):
        raise ValueError(
            f"available restricts sampler='bernoulli' or 'fixed'; sampler={sampler!r} chooses clients by itself, "
            f"use one of them"
        )


def present(available: Available, round: int, clients: int) -> list[int]:
    """Return the clients that can take part in a round, ascending. Raises ValueError for neither ids nor a mask."""
    try:
        availability = available(round)
        values = availability.tolist() if hasattr(availability, "tolist") else list(availability)
        mask = bool(values) and set(map(type, values)) == {bool}
        if mask and len(values) != clients:
            raise ValueError(f"a mask of {len(values)}")
        present_ids = [i for i, flag in enumerate(values) if flag]
        ids = present_ids if mask else _checked_ids(values, clients)
    except Exception as error:
        kind = "" if type(error) is ValueError else f"{type(error).__name__}: "
        raise ValueError(
            f"available must return client ids from 0 to {clients - 1}, or a mask of {clients} booleans; in round "
            f"{round + 1}: {kind}{error}"
        ) from error
    return ids


def _checked_ids(values: Sequence[Any], clients: int) -> list[int]:
    """Return different client ids in ascending order. Raises ValueError for a repeated id, or an unknown one."""
    ids = sorted(integer("a client id", i) for i in values)
    problem = ""
    if ids and not 0 <= ids[0] <= ids[-1] < clients:
        problem = f"{ids[0] if ids[0] < 0 else ids[-1]} is not a client"
    elif len(set(ids)) < len(ids):
        problem = f"client {next(a for a, b in pairwise(ids) if a == b)} is there twice"
    if problem and len(ids) == clients and {*ids} <= {0, 1}:
        problem += ". As a mask write booleans: [True, False, ...]"
    if problem:
        raise ValueError(problem)
    return ids


def draw_present(
    sampler: str, share_of: Callable[[int], float], available: Available, round: int, clients: int, seed: int
) -> list[int]:
    """Draw from the clients that can take part in the round, as `draw` does from all. Return an empty list if no client
    can. `share_of` returns the share that takes part, from a number of clients."""
    ids = present(available, round, clients)
    if not ids:
        return []
    return [ids[i] for i in draw(make(sampler, len(ids), share_of(len(ids))), round, seed)]


def likely(sampler: str | Sampler | None, clients: int, participation: float) -> int:
    """Return the largest likely number of clients of a round; for a callable the number of all clients."""
    if callable(sampler):
        return clients
    mean = participation * clients
    spread = 0.0 if sampler in ("fixed", "shuffled") else 2 * (mean * (1 - participation)) ** 0.5
    return max(1, min(clients, round(mean + spread)))


Weighting = Sequence[int] | Callable[[int], int]
WEIGHTINGS = ("uniform", "samples")
MAX_WEIGHT = 2**53  # a double has all whole numbers up to it


def checked_weighting(weighting: Any) -> str | list[Any] | Callable[[int], Any]:
    """Return the weighting, with an array as a list. Raises ValueError if no number of clients fits it."""
    if callable(weighting) or (isinstance(weighting, str) and weighting in WEIGHTINGS):
        return weighting
    try:
        weights = weighting.tolist() if hasattr(weighting, "tolist") else weighting
    except Exception:  # a tensor without values
        weights = None
    if isinstance(weights, (list, tuple, range)):
        return list(weights)
    raise ValueError(
        "weighting must be 'uniform', 'samples', a list with a whole number for each client, or a function of a "
        f"client's id (in a config its import path), got {weighting!r}"
    )


def own_weights(weighting: str | Weighting, clients: int) -> list[int] | None:
    """Return the weights of all clients if the user gives them, None for one of `WEIGHTINGS`.

    They are whole numbers, because sums over clients are exact.

    Raises:
        ValueError: they are not whole numbers from 1 to `MAX_WEIGHT`.
    """
    if isinstance(weighting, str):
        return None
    if not callable(weighting) and len(weighting) != clients:
        raise ValueError(f"weighting must have one weight for each of the {clients} clients, got {len(weighting)}")
    values = map(weighting, range(clients)) if callable(weighting) else weighting
    need = "weighting takes whole numbers (shares of 0.25 and 0.5 are 1 and 2): the weight of client"
    weights = [integer(f"{need} {i}", weight, at_least=1) for i, weight in enumerate(values)]
    if max(weights) > MAX_WEIGHT:
        i = weights.index(max(weights))
        raise ValueError(
            f"{need} {i} must be at most {MAX_WEIGHT} = 2^53, what the factor on an exact sum can hold, got "
            f"{weights[i]}; divide all weights by a number"
        )
    return weights
