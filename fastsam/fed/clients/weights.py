"""Weights of the clients in the server's mean."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from fastsam.fed.common.checks import integer

Weighting = Sequence[int] | Callable[[int], int]
NAMES = ("uniform", "samples")
MOST = 2**53  # a double has all whole numbers up to it


def checked_weighting(weighting: Any) -> str | list[Any] | Callable[[int], Any]:
    """Return the weighting, with an array of weights as a list. Raises ValueError if it is invalid for any number of
    clients."""
    if callable(weighting) or (isinstance(weighting, str) and weighting in NAMES):
        return weighting
    try:
        listed = weighting.tolist() if hasattr(weighting, "tolist") else weighting
    except Exception:  # a tensor without values
        listed = None
    if isinstance(listed, (list, tuple, range)):
        return list(listed)
    raise ValueError(
        "weighting must be 'uniform', 'samples', a list with a whole number for each client, or a function of a "
        "client's id "
        f"(in a config its import path), got {weighting!r}"
    )


def own_weights(weighting: str | Weighting, clients: int) -> list[int] | None:
    """The weights of all clients where the user names them; None for one of `NAMES`.

    Raises ValueError unless they are whole numbers from 1 to `MOST`. Whole numbers, because sums over clients are
    exact.
    """
    if isinstance(weighting, str):
        return None
    if not callable(weighting) and len(weighting) != clients:
        raise ValueError(f"weighting must have one weight for each of the {clients} clients, got {len(weighting)}")
    given = map(weighting, range(clients)) if callable(weighting) else weighting
    what = "weighting takes whole numbers (shares of 0.25 and 0.5 are 1 and 2): the weight of client"
    weights = [integer(f"{what} {i}", weight, at_least=1) for i, weight in enumerate(given)]
    if max(weights) > MOST:
        i = weights.index(max(weights))
        raise ValueError(
            f"{what} {i} must be at most {MOST} = 2^53, what the factor on an exact sum can hold, got {weights[i]}; "
            "divide all weights by a number"
        )
    return weights
