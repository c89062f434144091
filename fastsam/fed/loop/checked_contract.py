"""The calls of a user's algorithm: returned values are checked, and each error says what was expected.

In the first round of a run three things are checked once: rows of several clients are the rows of single clients,
padding is zero, and no argument is written into.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass
from typing import Any

import torch
from torch import Tensor

from fastsam.fed.algorithms.base import Aggregate, Algorithm, Round, State, Upload
from fastsam.fed.executors.client import Client
from fastsam.fed.loop.client_state import StateRows
from fastsam.fed.loop.contract import AlgorithmError, Contract, check_initial_state
from fastsam.fed.update.parameter_layout import ParameterLayout
from fastsam.fed.update.results import ClientResults
from fastsam.fed.update.steps import Step

log = logging.getLogger("fastsam.fed")
_COMPARED = 4  # clients of a call whose rows are compared
_Guard = tuple[str, Tensor, int]  # a tensor of an argument, with its name and version


def contract_of(algorithm: Algorithm) -> Contract:
    """Return the contract of an algorithm: checked unless its class, and the class that it wraps, are of fastsam."""
    is_user_defined = not type(getattr(algorithm, "inner", algorithm)).__module__.startswith("fastsam.")
    return CheckedContract(algorithm) if is_user_defined else Contract(algorithm)


class CheckedContract(Contract):
    """Calls of the methods of a user's algorithm. Wrong values raise ValueError, numbers that depend on which clients
    share a call AlgorithmError."""

    checks_steps = True

    def __init__(self, algorithm: Algorithm) -> None:
        super().__init__(algorithm)
        self._guards: list[_Guard] | None = None  # versions of the server's state, from the first call of round 1 on
        self._copy: Any = None  # makes the calls for single clients, until uploads were compared
        self._num_new = 0  # clients that begin together, until their steps were compared

    def _begin_round(self, server: State, round: Round) -> None:
        if self._guards is None and round.index == 0:
            self._guards, self._copy = _guards_of("server", server), _copy_of(self.algorithm)

    def init_server(self, w0: Tensor) -> State:
        return check_server(super().init_server(w0), w0, "init_server")

    def init_client(self, server: State, round: Round | None = None, client_ids: Sequence[int] = ()) -> State:
        if round is None:
            return check_initial_state(_check_client(super().init_client(server), "init_client"), "init_client")
        self._begin_round(server, round)
        self._num_new = len(client_ids)
        return _check_client(super().init_client(server, round, client_ids), "init_client")

    def local_step(self, server: State, client: State, n: int, round: Round, client_ids: Sequence[int] = ()) -> Step:
        if client_ids:
            self._begin_round(server, round)
        guards = _guards_of("client", client)
        step: object = super().local_step(server, client, n, round, client_ids)
        if round.index == 0:
            _check_guards(guards)
        if not isinstance(step, Step):
            raise ValueError(f"local_step must return a fastsam.fed.Step for all {n} clients, got {_kind(step)}")
        step.check(server["w"], n)
        if self._copy is not None and self._num_new > 1:
            self._num_new = 0
            two = {name: x[:1].expand(2, *x.shape[1:]) for name, x in client.items()}
            joint = self._copy.local_step(server, two, round)
            _check_rows(self._copy, "local_step", joint, [(server, client, round)], 2)
        return step

    def train_client(
        self, server: State, state: State, round: Round, client: Client, is_trial: bool = False
    ) -> Mapping[str, Tensor] | None:
        extra = super().train_client(server, state, round, client, is_trial)
        if extra is not None and not (isinstance(extra, Mapping) and _are_tensors(extra)):
            raise ValueError(f"train_client must return a dict of tensors, or None, got {_kind(extra)}")
        return extra

    def finish_clients(
        self, server: State, states: Sequence[State], client: State, results: ClientResults, round: Round
    ) -> tuple[State, Upload]:
        self._begin_round(server, round)
        n, guards, single_calls = len(states), _guards_of("client", client), []
        if self._copy is not None and n > 1:  # copies, because results may be written into
            first = enumerate(states[:_COMPARED])
            single_calls = [(server, StateRows.of([state]).rows, results.take([i]), round) for i, state in first]
        state, upload = _check_finished(super().finish_clients(server, states, dict(client), results, round), server, n)
        if self._copy is not None:
            _check_guards(guards)
            check_padding({**upload.mean, **upload.sum}, round.layout, "the Upload of finish")
            _check_rows(self._copy, "finish", (state, upload), single_calls, n)
        self._copy = None if single_calls else self._copy
        return state, upload

    def step_server(self, server: State, aggregate: Aggregate, round: Round) -> State:
        self._begin_round(server, round)
        new_state = check_server(super().step_server(server, aggregate, round), server["w"], "step_server")
        if round.index == 0:
            check_padding({"w": new_state["w"]}, round.layout, "the state that step_server returns")
            _check_guards(self._guards or ())
        self._copy = None
        return new_state


def check_server(server: object, like: Tensor, method: str) -> State:
    """Return the server's state. Raises ValueError unless it is a dict of tensors whose "w" is a row like `like`."""
    if not isinstance(server, dict) or not _are_tensors(server) or "w" not in server:
        raise ValueError(f"{method} must return a dict of tensors with the global model as 'w', got {_kind(server)}")
    w = server["w"]
    if w.shape != like.shape or w.dtype != like.dtype or w.device != like.device:
        raise ValueError(
            f"{method} must return 'w' as {like.dtype} {list(like.shape)} on {like.device}, got {w.dtype} "
            f"{list(w.shape)} on {w.device}"
        )
    return server


def _check_client(state: object, method: str) -> State:
    if not isinstance(state, dict) or not _are_tensors(state):
        raise ValueError(f"{method} must return a client's state as a dict of tensors, got {_kind(state)}")
    return state


def _check_finished(result: object, server: State, n: int) -> tuple[State, Upload]:
    """Return the clients' state, which may have tensors of `server`, and the Upload for n clients."""
    if not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[1], Upload):
        description = f"({', '.join(map(_kind, result))})" if isinstance(result, tuple) else _kind(result)
        raise ValueError(f"finish must return (client state, Upload), got {description}")
    state, upload = result
    for name in ("mean", "sum"):
        vectors = getattr(upload, name)
        if not isinstance(vectors, Mapping) or not _are_tensors(vectors):
            raise ValueError(f"Upload({name}=...) of finish must be a dict of tensors, got {_kind(vectors)}")
        _check_first_dimension(vectors, n, f"Upload({name}=...) of finish")
    server_ids = set(map(id, server.values()))
    private = {name: t for name, t in _check_client(state, "finish").items() if id(t) not in server_ids}
    _check_first_dimension(private, n, "the state that finish returns")
    return state, upload


def _check_first_dimension(vectors: Mapping[str, Tensor], n: int, label: str) -> None:
    for name, x in vectors.items():
        if x.dim() == 0 or len(x) != n:
            raise ValueError(
                f"{label} must have a row for each of the {n} clients, [{n}, ...]; got {list(x.shape)} for {name!r}. "
                f"A value that is the same for all of them becomes rows by x.expand({n}, *x.shape)"
            )


def _are_tensors(state: Mapping[Any, Any]) -> bool:
    return all(isinstance(t, Tensor) for t in state.values())


def _kind(value: object) -> str:
    """Return the type of a value, for messages. For a dict the values that are not tensors are named too."""
    if isinstance(value, dict):
        bad = [f"{name!r}: {type(t).__name__}" for name, t in value.items() if not isinstance(t, Tensor)]
        return f"dict with {', '.join(bad[:3])}" if bad else f"dict with {', '.join(map(repr, value)) or 'nothing'}"
    return type(value).__name__


# --- the first round ---


def _guards_of(owner: str, state: State) -> list[_Guard]:
    return [(f"{owner}[{name!r}]", t, t._version) for name, t in state.items()]


def _check_guards(guards: Sequence[_Guard]) -> None:
    for name, tensor, version in guards:
        if tensor._version != version:
            raise ValueError(
                f"a function of the algorithm wrote into {name}, which is shared; it must return a new tensor (x + y "
                "in place of x += y or x.add_(y))"
            )


def _copy_of(algorithm: Any) -> Any:
    """Return a copy, whose calls do not change the user's algorithm, or None if it cannot be copied."""
    try:
        return copy.deepcopy(algorithm)
    except Exception as error:
        log.info("%s cannot be copied: its rows are not compared (%s)", type(algorithm).__name__, error)
        return None


def check_padding(vectors: Mapping[str, Tensor], layout: ParameterLayout, label: str) -> None:
    """Raise ValueError for a finite number other than zero in the padding of rows `[..., row_size]`.

    Numbers that are not finite are handled elsewhere: their client is excluded, or the run stops with that reason.
    """
    for name, x in vectors.items():
        if x.dim() == 0 or x.shape[-1] != layout.row_size or not x.is_floating_point():
            continue
        values = x[..., layout.padding.to(x.device)]
        if bool((values.isfinite() & (values != 0)).any()):
            raise ValueError(
                f"{label} has numbers in the padding of {name!r}, which would enter its norms: between parameters a "
                f"row is zero. Draw random numbers into the views of round.layout.unflatten(row), or make the row of a "
                f"vector, round.layout.row(vector)"
            )


def _check_rows(algorithm: Any, method: str, joint: Any, single_calls: Sequence[Sequence[Any]], n: int) -> None:
    """Raise AlgorithmError unless a method gives n clients together (`joint`) the same numbers, to rounding, as each
    client of `single_calls` by itself."""
    with torch.random.fork_rng([]):
        for place, arguments in enumerate(single_calls):
            alone = getattr(algorithm, method)(*arguments)
            if any(_differs(a, b) for a, b in zip(_parts(joint, place, n), _parts(alone, 0, 1), strict=False)):
                raise AlgorithmError(
                    f"{type(algorithm).__name__}.{method} returns different numbers for {n} clients together and for "
                    "each by itself, so that results would depend on the executor. Each row must come from its own "
                    "client: use delta.norm(dim=1, keepdim=True) in place of delta.norm(), and draw random numbers "
                    "only from a generator whose seed is round.seed"
                )


def _parts(value: Any, place: int, n: int) -> list[Tensor]:
    """Return the tensors and numbers in `value` that belong to the client at `place` of n."""
    if isinstance(value, Tensor):
        return [value[place] if value.dim() > 0 and len(value) == n else value]
    if isinstance(value, (int, float)):
        return [torch.tensor(float(value), dtype=torch.float64)]
    if isinstance(value, list) and len(value) == n:  # a weight for each client
        value = value[place : place + 1]
    inner = vars(value) if is_dataclass(value) else value
    values = [x for _, x in sorted(inner.items())] if isinstance(inner, Mapping) else inner
    return [t for x in values for t in _parts(x, place, n)] if isinstance(values, (list, tuple)) else []


def _differs(a: Tensor, b: Tensor) -> bool:
    """Return whether a and b differ by more than rounding; NaN equals NaN."""
    if a.numel() != b.numel() or not a.is_floating_point():
        return False
    a, b, eps = a.flatten().double(), b.flatten().double(), torch.finfo(a.dtype).eps
    finite = a.isfinite() & b.isfinite()
    return bool(torch.where(finite, a - b, 0).norm() > eps**0.5 * torch.where(finite, a, 0).norm())
