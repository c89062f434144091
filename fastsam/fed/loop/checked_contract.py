"""The calls of a user's algorithm: returned values are checked, and each error says what was expected.

In the trial and in round 1 no call may write into its arguments, padding must be zero, and once for `local_step` and
once for `finish` the rows of several clients are compared with the row of one client.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fastsam.fed.algorithms.base import Aggregate, Algorithm, Round, State, Upload
from fastsam.fed.executors.client import Client
from fastsam.fed.loop.client_state import StateRows
from fastsam.fed.loop.contract import AlgorithmError, Contract
from fastsam.fed.update.parameter_layout import ParameterLayout
from fastsam.fed.update.results import ClientResults
from fastsam.fed.update.steps import Step
from fastsam.fed.update.tensor_checks import check_like, kind_of, tensor_dict

log = logging.getLogger("fastsam.fed")


def contract_of(algorithm: Algorithm) -> Contract:
    """Return the contract of an algorithm: checked unless its class, and the class that it wraps, are of fastsam."""
    is_user_defined = not type(getattr(algorithm, "inner", algorithm)).__module__.startswith("fastsam.")
    return CheckedContract(algorithm) if is_user_defined else Contract(algorithm)


class CheckedContract(Contract):
    """Calls of the methods of a user's algorithm. Wrong values raise ValueError, numbers that depend on which clients
    share a call AlgorithmError."""

    checks_steps = True
    _is_compared = False  # uploads of several clients were compared with the upload of one

    def call(self, method: str, arguments: Sequence[Any], round: int | None = None, clients: Sequence[int] = ()) -> Any:
        states = [] if round else [x for x in arguments if isinstance(x, dict)]  # checked in the trial and in round 1
        versions = Versions(dict(zip(("server", "client"), states, strict=False)))
        result = super().call(method, arguments, round, clients)
        versions.check(f"{type(self.algorithm).__name__}.{method}")
        return result

    def init_server(self, w0: Tensor) -> State:
        return _checked_server(super().init_server(w0), w0, "init_server")

    def init_client(self, server: State, round: Round | None = None, client_ids: Sequence[int] = ()) -> State:
        state = super().init_client(server, round, client_ids)
        return tensor_dict(state, "init_client must return a client's state as a dict of tensors")

    def local_step(self, server: State, client: State, n: int, round: Round, client_ids: Sequence[int] = ()) -> Step:
        step: object = super().local_step(server, client, n, round, client_ids)
        if not isinstance(step, Step):
            raise ValueError(f"local_step must return a fastsam.fed.Step for all {n} clients, got {kind_of(step)}")
        step.check(server["w"], n)
        if not client_ids:  # the trial, of a single new client
            rows = {name: x.expand(2, *x.shape[1:]) for name, x in client.items()}
            self._compare("local_step", self._call_copy("local_step", server, rows, round), step, 2)
        return step

    def train_client(
        self, server: State, state: State, round: Round, client: Client, is_trial: bool = False
    ) -> Mapping[str, Tensor] | None:
        extra = super().train_client(server, state, round, client, is_trial)
        return None if extra is None else tensor_dict(extra, "train_client must return a dict of tensors, or None")

    def finish_clients(
        self, server: State, states: Sequence[State], client: State, results: ClientResults, round: Round
    ) -> tuple[State, Upload]:
        n, single = len(states), None
        if round.index == 0 and n > 1 and not self._is_compared:  # before the call, which may write into the results
            self._is_compared = True
            single = self._call_copy("finish", server, StateRows.of(states[-1:]).rows, results.take([n - 1]), round)
        state, upload = _checked_result(super().finish_clients(server, states, dict(client), results, round), server, n)
        self._compare("finish", (state, upload), single, n)
        if round.index == 0:
            check_padding({**upload.mean, **upload.sum}, round.layout, "the Upload of finish")
        return state, upload

    def step_server(self, server: State, aggregate: Aggregate, round: Round) -> State:
        new_state = _checked_server(super().step_server(server, aggregate, round), server["w"], "step_server")
        if round.index == 0:
            check_padding({"w": new_state["w"]}, round.layout, "the state that step_server returns")
        return new_state

    def _call_copy(self, method: str, *arguments: Any) -> Any:
        """Call a method of a copy of the algorithm, whose state may change. Return None if it cannot be copied."""
        try:
            algorithm = copy.deepcopy(self.algorithm)
        except Exception as error:
            name = type(self.algorithm).__name__
            log.info("%s cannot be copied: rows of its %s are not compared (%s)", name, method, error)
            return None
        with torch.random.fork_rng([]):
            return Contract(algorithm).call(method, arguments, arguments[-1].index)

    def _compare(self, method: str, together: Any, single: Any, n: int) -> None:
        """Raise AlgorithmError if the result of n clients and the result of the last one by itself differ by more than
        rounding. Either may be None, if the algorithm cannot be copied."""
        pairs = zip(_last_row(together, n), _last_row(single, 1), strict=False)
        if any(_differ(a, b) for a, b in pairs):
            raise AlgorithmError(
                f"{type(self.algorithm).__name__}.{method} returns different numbers for {n} clients together and for "
                "each by itself, so that results would depend on the executor. Each row must come from its own client: "
                "use delta.norm(dim=1, keepdim=True) in place of delta.norm(), and draw random numbers only from a "
                "generator whose seed is round.seed"
            )


class Versions:
    """The versions of the tensors of states, which every write changes. `states` has the states by their owners."""

    def __init__(self, states: Mapping[str, State]) -> None:
        self._tensors = [(f"{who}[{name!r}]", x, x._version) for who, s in states.items() for name, x in s.items()]

    def check(self, writer: str) -> None:
        """Raise ValueError if a tensor was written."""
        for name, x, version in self._tensors:
            if x._version != version:
                raise ValueError(
                    f"{writer} wrote into {name}, which is shared; it must return a new tensor (x + y in place of "
                    "x += y or x.add_(y))"
                )


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


def _checked_server(value: object, like: Tensor, method: str) -> State:
    """Return the server's state. Raises ValueError unless it is a dict of tensors whose "w" is a row like `like`."""
    expected = f"{method} must return a dict of tensors with the global model as 'w', {kind_of(like)}"
    server = tensor_dict(value, expected)
    check_like(server.get("w", server), like, expected)
    return server


def _checked_result(value: object, server: State, n: int) -> tuple[State, Upload]:
    """Return the clients' state, which may have tensors of `server`, and the Upload for n clients."""
    if not isinstance(value, tuple) or len(value) != 2 or not isinstance(value[1], Upload):
        raise ValueError(f"finish must return (client state, Upload), got {kind_of(value)}")
    state, upload = value
    for label, vectors in (
        ("the state that finish returns", state),
        ("Upload(mean=...) of finish", upload.mean),
        ("Upload(sum=...) of finish", upload.sum),
    ):
        for name, x in tensor_dict(vectors, f"{label} must be a dict of tensors").items():
            is_shared = vectors is state and any(x is t for t in server.values())
            if not is_shared and (x.dim() == 0 or len(x) != n):
                raise ValueError(
                    f"{label} must have a row for each of the {n} clients, [{n}, ...]; got {list(x.shape)} for "
                    f"{name!r}. A value that is the same for all of them becomes rows by x.expand({n}, *x.shape)"
                )
    return state, upload


def _last_row(value: Any, n: int) -> Iterator[Tensor]:
    """Yield the tensors and numbers in a step, a state or an upload that belong to the last of n clients."""
    if isinstance(value, Step):
        value = vars(value)
    elif isinstance(value, Upload):
        value = (value.mean, value.sum, None if value.weight is None else torch.as_tensor(value.weight))
    if isinstance(value, Tensor):
        yield value[-1] if value.dim() > 0 and len(value) == n else value
    elif isinstance(value, (Mapping, list, tuple)):
        for x in value.values() if isinstance(value, Mapping) else value:
            yield from _last_row(x, n)
    else:
        yield torch.tensor([value] if isinstance(value, (int, float)) else [], dtype=torch.float64)


def _differ(a: Tensor, b: Tensor) -> bool:
    """Return whether a and b differ by more than rounding. Infinite numbers and NaN count as 0."""
    if a.numel() != b.numel() or not a.is_floating_point():
        return False
    rounding = torch.finfo(a.dtype).eps ** 0.5
    a, b = (x.flatten().double().nan_to_num(0.0, 0.0, 0.0) for x in (a, b))
    return bool((a - b).norm() > rounding * a.norm())
