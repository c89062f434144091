"""The check of a user's algorithm in the first round: the results of each client come from its own row, and `self`
stays.

`CheckedContract` (see `fastsam.fed.loop.algorithm_calls`) calls `check_rows` for the first block of several clients.
Without it the results of an algorithm that mixes rows would depend on the executor.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from fastsam.fed.algorithms.base import Round, State
from fastsam.fed.executors.recording import comparable
from fastsam.fed.loop.client_state import rows
from fastsam.fed.loop.contract import AlgorithmError

log = logging.getLogger("fastsam.fed")
COMPARED = 4  # clients of a block


def is_own(algorithm: object) -> bool:
    """Return True if the class of the algorithm, or of the algorithm that it wraps, is not a class of fastsam."""
    inner = getattr(algorithm, "inner", algorithm)
    return not type(inner).__module__.startswith("fastsam.")


def copied(algorithm: Any) -> Any:
    """Return a copy, whose calls do not change the attributes of the user's algorithm, or None if it cannot be
    copied."""
    try:
        return copy.deepcopy(algorithm)
    except Exception as error:
        log.info("%s cannot be copied: its rows are not compared (%s)", type(algorithm).__name__, error)
        return None


def check_rows(algorithm: Any, method: str, together: Any, alone: Sequence[Sequence[Any]], n: int) -> None:
    """Compare the result of a method for n clients together with its results for each client separately.

    Args:
        algorithm: a copy of the user's algorithm.
        method: name of the method.
        together: its result for all n clients.
        alone: its arguments for each client separately.
        n: number of clients.

    Raises:
        AlgorithmError: they differ by more than rounding.
    """
    with torch.random.fork_rng([]):
        for place, arguments in enumerate(alone):
            made = getattr(algorithm, method)(*arguments)
            if any(_differs(a, b) for a, b in zip(_parts(together, place, n), _parts(made, 0, 1), strict=False)):
                raise AlgorithmError(
                    f"{type(algorithm).__name__}.{method} returns different numbers for {n} clients together and for "
                    "each by itself, so that results would depend on the executor. Each row must come from its own "
                    "client: delta.norm(dim=1, keepdim=True) in place of delta.norm(), and no random numbers but "
                    "those of a generator with a seed of round.seed"
                )


def check_local_update(algorithm: Any, server: State, client: State, round: Round) -> None:
    """Raise AlgorithmError if `local_update` gives two clients with the state `client` another LocalUpdate than one
    client.

    Args:
        algorithm: a copy of the user's algorithm.
        server: the server's state.
        client: state of a new client.
        round: the round, as the algorithm sees it.
    """
    together = algorithm.local_update(server, rows([client, client]), round)
    check_rows(algorithm, "local_update", together, [(server, rows([client]), round)], 2)


def _parts(value: Any, place: int, n: int) -> Iterator[Tensor | float]:
    """The tensors and numbers in `value` that belong to the client at `place` of n."""
    if isinstance(value, Tensor):
        yield value[place] if value.dim() > 0 and len(value) == n else value
    elif isinstance(value, (int, float)):
        yield value
    elif isinstance(value, Mapping):
        for name in sorted(value):
            yield from _parts(value[name], place, n)
    elif is_dataclass(value):
        for field in fields(value):
            yield from _parts(getattr(value, field.name), place, n)
    elif isinstance(value, tuple) or (isinstance(value, list) and value and isinstance(value[0], Tensor)):
        for part in value:
            yield from _parts(part, place, n)
    elif isinstance(value, list) and len(value) == n:  # a LocalUpdate, or a weight, for each client
        yield from _parts(value[place], 0, 1)


def _differs(a: Tensor | float, b: Tensor | float) -> bool:
    """Return whether a and b differ by more than rounding; NaN equals NaN."""
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return not isinstance(a, Tensor) and not isinstance(b, Tensor) and not math.isclose(a, b, rel_tol=1e-4)
    if a.numel() != b.numel() or not a.is_floating_point():
        return False
    a, b = a.flatten(), b.flatten()
    finite = a.isfinite() & b.isfinite()
    off = torch.where(finite, a - b, 0).double().norm()
    return bool(off > torch.finfo(a.dtype).eps ** 0.5 * torch.where(finite, a, 0).double().norm())


def attributes(algorithm: object) -> dict[str, object]:
    """Return a description of the attributes of the algorithm, to be compared after the first round."""
    inner = getattr(algorithm, "inner", algorithm)
    return {name: comparable(value) for name, value in vars(inner).items()} if is_own(algorithm) else {}


def warn_changed(algorithm: object, before: Mapping[str, object]) -> None:
    """Log a warning for attributes of the algorithm that are no longer as `before`."""
    after = attributes(algorithm)
    changed = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
    if changed:
        log.warning(
            "the first round changed attributes of %s (%s): a resumed run, other executors and other ranks do not have "
            "them. Keep such values in the states that its functions return",
            type(algorithm).__name__,
            ", ".join(changed),
        )
