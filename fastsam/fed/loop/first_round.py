"""Checks of a user's algorithm in the first round of a run: rows of clients, padding, and attributes that change."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from fastsam.fed.algorithms.base import Algorithm, Round, State, Upload
from fastsam.fed.executors.recording import comparable
from fastsam.fed.loop.client_state import StateRows
from fastsam.fed.loop.contract import AlgorithmError
from fastsam.fed.update.local_update import ClientResults
from fastsam.fed.update.parameter_layout import ParameterLayout

log = logging.getLogger("fastsam.fed")
COMPARED = 4  # clients of a block whose rows are compared


class FirstRound:
    """The checks of the first round of a run.

    The rows of several clients are compared with the rows of single clients, once per method: results of an algorithm
    that mixes rows would depend on the executor. A copy of the algorithm makes the calls, so that they do not change
    the user's object.

    Attributes:
        num_new: number of clients that begin together with the first state, until their local updates were compared.
    """

    def __init__(self, algorithm: Algorithm) -> None:
        self.num_new = 0
        self._algorithm, self._attributes = algorithm, _attributes(algorithm)
        self._copy: Any = _copy_of(algorithm)  # None after uploads were compared, or if it cannot be copied
        self._has_seen_upload = False

    def compare_updates(self, server: State, client: State, round: Round) -> None:
        """Compare the local updates of two clients with the first state and of one."""
        if self.num_new < 2 or self._copy is None:
            return
        self.num_new = 0
        single = StateRows.of([{name: x[0] for name, x in client.items()}]).rows
        two = {name: x.expand(2, *x.shape[1:]) for name, x in single.items()}
        joint_result = self._copy.local_update(server, two, round)
        check_rows(self._copy, "local_update", joint_result, [(server, single, round)], 2)

    def single_calls(
        self, server: State, states: Sequence[State], results: ClientResults, round: Round
    ) -> list[tuple[Any, ...]]:
        """Return the arguments of `finish_client` for single clients. They are copies, because results may be written
        into."""
        if len(states) < 2 or self._copy is None:
            return []
        first_states = enumerate(states[:COMPARED])
        return [(server, StateRows.of([state]).rows, results.take([i]), round) for i, state in first_states]

    def check_finished(
        self, result: tuple[State, Upload], single_calls: Sequence[Sequence[Any]], n: int, round: Round
    ) -> None:
        """Compare the result of `finish_client` for n clients with the results of `single_calls`, and check the padding
        of the first upload."""
        if single_calls:
            check_rows(self._copy, "finish_client", result, single_calls, n)
            self._copy = None
        if not self._has_seen_upload:
            self._has_seen_upload = True
            upload = result[1]
            check_padding({**upload.mean, **upload.sum}, round.layout, "the Upload of finish_client")

    def check_server(self, server: State, round: Round) -> None:
        """Check the padding of the global model, and log a warning for attributes that the round has changed."""
        check_padding({"w": server["w"]}, round.layout, "the state that step_server returns")
        old, new = self._attributes, _attributes(self._algorithm)
        names = sorted(name for name in old.keys() | new.keys() if old.get(name) != new.get(name))
        if names:
            log.warning(
                "the first round changed attributes of %s (%s): a resumed run, other executors and other ranks do not "
                "have them. Keep such values in the states that its functions return",
                type(self._algorithm).__name__,
                ", ".join(names),
            )


def _copy_of(algorithm: Any) -> Any:
    """Return a copy, whose calls do not change the user's algorithm, or None if it cannot be copied."""
    try:
        return copy.deepcopy(algorithm)
    except Exception as error:
        log.info("%s cannot be copied: its rows are not compared (%s)", type(algorithm).__name__, error)
        return None


def _attributes(algorithm: object) -> dict[str, object]:
    return {name: comparable(value) for name, value in vars(getattr(algorithm, "inner", algorithm)).items()}


def check_padding(vectors: Mapping[str, Tensor], layout: ParameterLayout, label: str) -> None:
    """Raise ValueError for a finite number other than zero in the padding of rows `[..., row_size]`.

    Numbers that are not finite are handled elsewhere: their client is excluded, or the run stops with that reason.
    """
    padding = layout.padding
    for name, x in vectors.items():
        if x.dim() == 0 or x.shape[-1] != layout.row_size or not x.is_floating_point():
            continue
        values = x[..., padding.to(x.device)]
        if bool((values.isfinite() & (values != 0)).any()):
            raise ValueError(
                f"{label} has numbers in the padding of {name!r}, which would enter its norms: between parameters a "
                f"row is zero. Draw random numbers into the views of round.layout.unflatten(row), or make the row of a "
                f"vector, round.layout.row(vector)"
            )


def check_rows(algorithm: Any, method: str, joint_result: Any, single_calls: Sequence[Sequence[Any]], n: int) -> None:
    """Check that a method gives n clients the same numbers, to rounding, as each client separately.

    Args:
        algorithm: copy of the algorithm.
        method: name of the method.
        joint_result: its result for all n clients.
        single_calls: arguments for single clients.
        n: number of clients.

    Raises:
        AlgorithmError: the numbers differ.
    """
    with torch.random.fork_rng([]):
        for place, arguments in enumerate(single_calls):
            row_result = getattr(algorithm, method)(*arguments)
            if any(
                _differs(a, b) for a, b in zip(_parts(joint_result, place, n), _parts(row_result, 0, 1), strict=False)
            ):
                raise AlgorithmError(
                    f"{type(algorithm).__name__}.{method} returns different numbers for {n} clients together and for "
                    "each by itself, so that results would depend on the executor. Each row must come from its own "
                    "client: use delta.norm(dim=1, keepdim=True) in place of delta.norm(), and draw random numbers "
                    "only from a generator whose seed is round.seed"
                )


def _parts(value: Any, place: int, n: int) -> Iterator[Tensor | float]:
    """Yield the tensors and numbers in `value` that belong to the client at `place` of n."""
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
    difference = torch.where(finite, a - b, 0).double().norm()
    return bool(difference > torch.finfo(a.dtype).eps ** 0.5 * torch.where(finite, a, 0).double().norm())
