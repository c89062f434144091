"""The measures of a run (`measures=`): numbers of clients that enter the sums, and numbers of rounds."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from fastsam.fed.algorithms.base import Aggregate, Round, State
from fastsam.fed.measures import Measures
from fastsam.fed.stages.base import ClientUploads, Stage
from fastsam.fed.sums.ranks import Ranks


class Measuring(Stage):
    """Call the measures in every round. They read the aggregate without noise."""

    def __init__(self, measures: Measures) -> None:
        self.measures = measures
        self._aggregate: Aggregate | None = None

    def snapshots(self, round: Round, num_steps: int) -> Iterable[int]:
        """Return the local steps before which the measures want a copy of a client's row."""
        return self.measures.snapshots(round.index, num_steps)

    def process_uploads(self, uploads: ClientUploads, round: Round) -> None:
        """Add the measures' numbers of the clients to the scalars."""
        values = self.measures.clients(uploads.server, uploads.results, round)
        n = len(uploads.results.client_ids)
        uploads.scalars |= rows_of_numbers(values, "clients()", uploads.scalars, n)

    def end_round(self, ranks: Ranks, round: Round) -> None:
        """Let the measures exchange what they keep with the other ranks."""
        join = getattr(self.measures, "join", None)
        if join is not None:
            join(ranks, round)

    def process_aggregate(self, aggregate: Aggregate | None, server: State, round: Round) -> Aggregate | None:
        """Keep the aggregate for `measure`."""
        self._aggregate = aggregate
        return aggregate

    def measure(
        self, old_state: State, new_state: State, buffers: list[Tensor], round: Round, reserved_names: Iterable[str]
    ) -> dict[str, Any]:
        """Return the measures' numbers of the round; none of a round without clients."""
        aggregate, self._aggregate = self._aggregate, None
        if aggregate is None:
            return {}
        round = replace(round, layout=round.layout.with_buffers(buffers))
        return numbers(self.measures.round(old_state, new_state, aggregate, round), "round()", set(reserved_names))


def numbers(values: Any, method: str, reserved_names: Container[str]) -> dict[str, float | None]:
    """Return the values that a method of the measures returned, as Python's own numbers.

    Raises:
        ValueError: it is not a dict of numbers (or None), or a name is taken.
    """
    return {
        name: value if value is None or isinstance(value, (int, float)) else _number(value, method, name)
        for name, value in _entries(values, method, reserved_names)
    }


def rows_of_numbers(mapping: Any, method: str, reserved_names: Container[str], n: int) -> dict[str, list[float]]:
    """Return the numbers of n clients that a method of the measures returned: a list of n numbers under each name.

    Raises:
        ValueError: it is not a dict of n numbers under each name, or a name is taken.
    """
    columns: dict[str, list[float]] = {}
    for name, values in _entries(mapping, method, reserved_names):
        if not isinstance(values, (Sequence, Tensor)) or isinstance(values, str) or len(values) != n:
            raise ValueError(
                f"the measures' {method} must return {n} numbers, one for each client, got {_type(values)} for {name!r}"
            )
        columns[name] = [_number(value, method, name) for value in values]
    return columns


def _entries(values: Any, method: str, reserved_names: Container[str]) -> Iterable[tuple[str, Any]]:
    if not isinstance(values, Mapping):
        raise ValueError(f"the measures' {method} must return a dict of numbers, got {_type(values)}")
    for name in values:
        if name in reserved_names:
            raise ValueError(
                f"the measures' {method} returned {name!r}, which the run has already; choose another name"
            )
    return values.items()


def _number(value: Any, method: str, name: str) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"the measures' {method} must return numbers (or None), got {_type(value)} for {name!r}"
        ) from error


def _type(value: object) -> str:
    return type(value).__name__
