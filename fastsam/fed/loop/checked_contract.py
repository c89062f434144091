"""The calls of a user's algorithm: every returned value is checked, and each error says what was expected."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from fastsam.fed.algorithms.base import Aggregate, Algorithm, Round, State, Upload
from fastsam.fed.executors.client import Client
from fastsam.fed.loop.contract import Contract, check_initial_state
from fastsam.fed.loop.first_round import FirstRound
from fastsam.fed.update.local_update import ClientResults, ClientUpdate, LocalUpdate


def contract_of(algorithm: Algorithm) -> Contract:
    """Return the contract of an algorithm: checked unless its class, and the class that it wraps, are of fastsam."""
    is_user_defined = not type(getattr(algorithm, "inner", algorithm)).__module__.startswith("fastsam.")
    return CheckedContract(algorithm) if is_user_defined else Contract(algorithm)


class CheckedContract(Contract):
    """Calls of the methods of a user's algorithm: every returned value is checked, and arguments are guarded against
    writes.

    `FirstRound` has further checks for the first round.
    """

    def __init__(self, algorithm: Algorithm) -> None:
        super().__init__(algorithm)
        self._index = -1  # index of the present round
        self._guards: list[_Guard] = []
        self._first_round: FirstRound | None = None

    def init_server(self, w0: Tensor) -> State:
        """Return the server's state. Raises ValueError if it is not a dict of tensors with "w"."""
        return check_server(super().init_server(w0), w0, "init_server")

    def init_client(self, server: State, round: Round | None = None, client_ids: Sequence[int] = ()) -> State:
        """Return the state of new clients. Raises ValueError if it is not a dict of tensors, or begins with NaN."""
        if round is None:
            return check_initial_state(_check_client(super().init_client(server), "init_client"), "init_client")
        self._begin_round(server, round)
        state = _check_client(super().init_client(server, round, client_ids), "init_client")
        self._guards += _guards_of("client", state)
        if self._first_round is not None:
            self._first_round.num_new = len(client_ids)
        return state

    def local_updates(
        self, server: State, client: State, n: int, round: Round, client_ids: Sequence[int] = ()
    ) -> list[ClientUpdate]:
        """Return the constants of n clients. Raises ValueError unless there is one LocalUpdate, or n of them."""
        if client_ids:
            self._begin_round(server, round)
        index = round.index if client_ids else None
        updates = _check_updates(self.call("local_update", (server, client, round), index, client_ids), server["w"], n)
        if self._first_round is not None:
            self._first_round.compare_updates(server, client, round)
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
        if self._first_round is not None:
            single_calls = self._first_round.single_calls(server, states, results, round)
        result = super().finish_clients(server, states, dict(client), results, round)
        _check_guards(guards)
        state, upload = _check_finished(result, server, len(states))
        if self._first_round is not None:
            self._first_round.check_finished(result, single_calls, len(states), round)
        return state, upload

    def step_server(self, server: State, aggregate: Aggregate, round: Round) -> State:
        """Return the server's state. Raises ValueError if it is not a dict with "w", or if a state was written into."""
        self._begin_round(server, round)
        new_state = check_server(super().step_server(server, aggregate, round), server["w"], "step_server")
        if self._first_round is not None:
            self._first_round.check_server(new_state, round)
        _check_guards(self._guards)
        return new_state

    def _begin_round(self, server: State, round: Round) -> None:
        """Begin to guard the server's state, at the first call of a round."""
        if self._index != round.index:
            self._index, self._guards = round.index, _guards_of("server", server)
            self._first_round = FirstRound(self.algorithm) if round.index == 0 else None


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
    state = {} if update.optimizer_state is None else update.optimizer_state
    if not isinstance(state, Mapping) or not _are_tensors(state):
        raise ValueError(f"LocalUpdate.optimizer_state must be a dict of tensors, or None, got {_kind(state)}")
    for name, x in state.items():
        if x.dim() == 0 or len(x) not in (1, n):
            raise ValueError(
                f"LocalUpdate.optimizer_state[{name!r}] must be [{n}, ...], or [1, ...] for all {n} clients, got "
                f"{list(x.shape)}. Add a first dimension: x[None]"
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
