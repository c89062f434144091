"""The calls of a user's algorithm: every returned value is checked, and each error says what was expected."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from fastsam.fed.algorithms.base import Aggregate, Algorithm, Round, State, Upload
from fastsam.fed.executors.client import Client
from fastsam.fed.executors.recording import comparable
from fastsam.fed.loop.client_state import rows
from fastsam.fed.loop.contract import AlgorithmError, ClientUpdate, Contract, check_initial_state
from fastsam.fed.step.local_update import ClientResults, LocalUpdate
from fastsam.fed.step.parameter_layout import ParameterLayout

log = logging.getLogger("fastsam.fed")
COMPARED = 4  # clients of a block whose rows are compared


def contract_of(algorithm: Algorithm) -> Contract:
    """Return the contract of an algorithm: checked unless its class, and the class that it wraps, are of fastsam."""
    is_user_defined = not type(getattr(algorithm, "inner", algorithm)).__module__.startswith("fastsam.")
    return CheckedContract(algorithm) if is_user_defined else Contract(algorithm)


class CheckedContract(Contract):
    """Calls of the methods of a user's algorithm: every returned value is checked, and arguments are guarded against
    writes.

    In the first round the rows of several clients are compared with the rows of single clients: results of an
    algorithm that mixes rows would depend on the executor. The padding of rows is checked then, and a warning names
    attributes that the round has changed.
    """

    def __init__(self, algorithm: Algorithm) -> None:
        super().__init__(algorithm)
        self._index = -1  # index of the present round
        self._guards: list[_Guard] = []
        self._copy: Any = None  # a copy of the algorithm, in the first round until rows have been compared
        self._attributes: dict[str, object] = {}
        self._new_clients = 0
        self._has_seen_upload = True

    def init_server(self, w0: Tensor) -> State:
        """Return the server's state. Raises ValueError if it is not a dict of tensors with "w"."""
        return check_server(super().init_server(w0), w0, "init_server")

    def init_client(self, server: State, round: Round | None = None, client_ids: Sequence[int] = ()) -> State:
        """Return the state of new clients. Raises ValueError if it is not a dict of tensors, or begins with NaN."""
        if round is not None:
            self._begin_round(server, round)
        state = _check_client(super().init_client(server, round, client_ids), "init_client")
        if round is None:
            return check_initial_state(state, "init_client")
        self._guards += _guards_of("client", state)
        self._new_clients = len(client_ids)
        return state

    def local_updates(
        self, server: State, client: State, n: int, round: Round, client_ids: Sequence[int] = ()
    ) -> list[ClientUpdate]:
        """Return the constants of n clients. Raises ValueError unless there is one LocalUpdate, or n of them."""
        if client_ids:
            self._begin_round(server, round)
        index = round.index if client_ids else None
        updates = _check_updates(self.call("local_update", (server, client, round), index, client_ids), server["w"], n)
        if self._new_clients > 1 and self._copy is not None:
            self._new_clients = 0
            single = rows([{name: x[0] for name, x in client.items()}])
            two = {name: x.expand(2, *x.shape[1:]) for name, x in single.items()}
            joint_result = self._copy.local_update(server, two, round)
            check_rows(self._copy, "local_update", joint_result, [(server, single, round)], 2)
        return updates

    def train_client(
        self, server: State, state: State, round: Round, client: Client, is_trial: bool = False
    ) -> Mapping[str, Tensor] | None:
        """Do the local work of a client. Raises ValueError unless the loop returns a dict of tensors, or None."""
        extra = super().train_client(server, state, round, client, is_trial)
        if extra is not None and not (isinstance(extra, Mapping) and _are_tensors(extra)):
            raise ValueError(f"train_client must return a dict of tensors, or None, got {_kind(extra)}")
        return extra

    def finish_clients(
        self, server: State, states: Sequence[State], client: State, results: ClientResults, round: Round
    ) -> tuple[State, Upload]:
        """Return new states and the upload of n clients. Raises ValueError for other values, and for written states."""
        self._begin_round(server, round)
        guards, single_calls = _guards_of("client", client), []
        if len(states) > 1 and self._copy is not None:  # copies, because results may be written into
            first_states = enumerate(states[:COMPARED])
            single_calls = [(server, rows([state]), results.take([i]), round) for i, state in first_states]
        result = super().finish_clients(server, states, dict(client), results, round)
        _check_guards(guards)
        state, upload = _check_finished(result, server, len(states))
        if single_calls:
            check_rows(self._copy, "finish_client", result, single_calls, len(states))
            self._copy = None
        if not self._has_seen_upload:
            self._has_seen_upload = True
            check_padding({**upload.mean, **upload.sum}, round.layout, "the Upload of finish_client")
        return state, upload

    def step_server(self, server: State, aggregate: Aggregate, round: Round) -> State:
        """Return the server's state. Raises ValueError if it is not a dict with "w", or if a state was written into."""
        self._begin_round(server, round)
        new_state = check_server(super().step_server(server, aggregate, round), server["w"], "step_server")
        if round.index == 0:
            check_padding({"w": new_state["w"]}, round.layout, "the state that step_server returns")
            self._warn_changed()
        _check_guards(self._guards)
        return new_state

    def _begin_round(self, server: State, round: Round) -> None:
        """Begin to guard the server's state, at the first call of a round."""
        if self._index == round.index:
            return
        self._index, self._guards, self._new_clients = round.index, _guards_of("server", server), 0
        first = round.index == 0
        self._copy = _copy_of(self.algorithm) if first else None
        self._attributes = _attributes(self.algorithm) if first else {}
        self._has_seen_upload = not first

    def _warn_changed(self) -> None:
        """Log a warning for attributes of the algorithm that the first round has changed."""
        old, new = self._attributes, _attributes(self.algorithm)
        names = sorted(name for name in old.keys() | new.keys() if old.get(name) != new.get(name))
        if names:
            log.warning(
                "the first round changed attributes of %s (%s): a resumed run, other executors and other ranks do not "
                "have them. Keep such values in the states that its functions return",
                type(self.algorithm).__name__,
                ", ".join(names),
            )


# --- returned values ---


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


def _check_updates(updates: object, w: Tensor, n: int) -> list[ClientUpdate]:
    """Return for each of n clients the LocalUpdate of `local_update`, and the client's row in it."""
    if isinstance(updates, LocalUpdate):
        return [(_check_vectors(updates, w, n), row) for row in range(n)]
    candidates = updates if isinstance(updates, Sequence) else ()
    if len(candidates) != n or not all(isinstance(update, LocalUpdate) for update in candidates):
        kind = f"{len(candidates)} times {_kind(candidates[0])}" if candidates else _kind(updates)
        raise ValueError(
            f"local_update must return a fastsam.fed.LocalUpdate (or a list of {n}, one for each client), got {kind}"
        )
    return [(_check_vectors(update, w, 1), 0) for update in candidates]


def _check_vectors(update: LocalUpdate, w: Tensor, n: int) -> LocalUpdate:
    for name in update.constants.vectors:
        v = getattr(update, name)
        fits = isinstance(v, Tensor) and v.shape in (w.shape, (n, *w.shape))
        if not fits or (v.dtype, v.device) != (w.dtype, w.device):
            description = f"{v.dtype} {list(v.shape)} on {v.device}" if isinstance(v, Tensor) else _kind(v)
            raise ValueError(
                f"LocalUpdate.{name} must be {w.dtype} {[n, *w.shape]} (or {list(w.shape)}, one for all {n} clients) "
                f"on {w.device}, like the server's w; got {description}"
            )
    return update


def _check_finished(result: object, server: State, n: int) -> tuple[State, Upload]:
    """Return the client's state, which may have tensors of `server`, and the Upload for n clients."""
    if not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[1], Upload):
        description = f"({', '.join(map(_kind, result))})" if isinstance(result, tuple) else _kind(result)
        raise ValueError(f"finish_client must return (client state, Upload), got {description}")
    state, upload = result
    for name in ("mean", "sum"):
        vectors = getattr(upload, name)
        if not isinstance(vectors, Mapping) or not _are_tensors(vectors):
            raise ValueError(f"Upload({name}=...) of finish_client must be a dict of tensors, got {_kind(vectors)}")
        _check_first_dimension(vectors, n, f"Upload({name}=...) of finish_client")
    server_ids = set(map(id, server.values()))
    private = {name: t for name, t in _check_client(state, "finish_client").items() if id(t) not in server_ids}
    _check_first_dimension(private, n, "the state that finish_client returns")
    return state, upload


def _check_first_dimension(vectors: Mapping[str, Tensor], n: int, label: str) -> None:
    for name, x in vectors.items():
        if x.dim() == 0 or len(x) != n:
            raise ValueError(
                f"{label} must have a row for each of the {n} clients, [{n}, ...]; got {list(x.shape)} for {name!r}. "
                f"A value that is the same for all of them becomes rows by x.expand({n}, *x.shape)"
            )


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


def _are_tensors(state: Mapping[Any, Any]) -> bool:
    return all(isinstance(t, Tensor) for t in state.values())


def _kind(value: object) -> str:
    """Return the type of a value, for messages. For a dict the values that are not tensors are named too."""
    if isinstance(value, dict):
        bad = [f"{name!r}: {type(t).__name__}" for name, t in value.items() if not isinstance(t, Tensor)]
        return f"dict with {', '.join(bad[:3])}" if bad else f"dict with {', '.join(map(repr, value)) or 'nothing'}"
    return type(value).__name__


# --- tensors that must not be written ---

_Guard = tuple[str, Tensor, int]  # a tensor of an argument, with its name and version


def _guards_of(owner: str, state: State) -> list[_Guard]:
    return [(f"{owner}[{name!r}]", t, t._version) for name, t in state.items()]


def _check_guards(guards: Sequence[_Guard]) -> None:
    for name, tensor, version in guards:
        if tensor._version != version:
            raise ValueError(
                f"a function of the algorithm wrote into {name}, which is shared; it must return a new tensor (x + y "
                "in place of x += y or x.add_(y))"
            )


# --- the first round: each client's results come from its own row, and attributes stay ---


def _copy_of(algorithm: Any) -> Any:
    """Return a copy, whose calls do not change the user's algorithm, or None if it cannot be copied."""
    try:
        return copy.deepcopy(algorithm)
    except Exception as error:
        log.info("%s cannot be copied: its rows are not compared (%s)", type(algorithm).__name__, error)
        return None


def _attributes(algorithm: object) -> dict[str, object]:
    return {name: comparable(value) for name, value in vars(getattr(algorithm, "inner", algorithm)).items()}


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
