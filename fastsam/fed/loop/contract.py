"""Checks of a user's algorithm and measures. Each error says what was expected, as early as it can be found."""

from __future__ import annotations

import cmath
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from fastsam.fed.algorithms.base import State, Upload
from fastsam.fed.executors.base import ClientError
from fastsam.fed.step.local_update import LocalUpdate
from fastsam.fed.sums.fixed_point import Problems


class AlgorithmError(ValueError):
    """A method of the algorithm raised; the cause is attached. Rounds count from 1, as in the records."""


def call_algorithm(
    algorithm: object, method: str, arguments: Sequence[Any], round: int | None, clients: Sequence[int] = ()
) -> Any:
    """Call a method of an algorithm and return its result.

    Args:
        algorithm: the algorithm.
        method: name of the method.
        arguments: its arguments.
        round: index of the round, None before the first round.
        clients: ids of the clients whose rows it gets.

    Raises:
        AlgorithmError: the method raised an exception.
        ClientError: the model or the loss raised in a loop of the algorithm.
    """
    try:  # not a context manager, which costs as much as a kernel call
        return getattr(algorithm, method)(*arguments)
    except ClientError:
        raise
    except Exception as error:
        if round is None and type(error) is ValueError and type(algorithm).__module__.startswith("fastsam."):
            raise  # an error of fastsam names the wrong option
        where = "before round 1" if round is None else f"in round {round + 1}"
        if clients:
            named = ", ".join(map(str, clients[:8])) + (", ..." if len(clients) > 8 else "")
            where += f", client{'s' if len(clients) > 1 else ''} {named}"
        kind = "" if type(error) is ValueError else f"{type(error).__name__}: "
        text = error.args[0] if isinstance(error, KeyError) and error.args else error  # which would be quoted
        raise AlgorithmError(f"{type(algorithm).__name__}.{method} failed {where}: {kind}{text}") from error


_METHODS = ("init_server", "init_client", "local_update", "finish_client", "step_server")


def check_algorithm(algorithm: object) -> None:
    """Raises ValueError unless `algorithm` has the methods and the traffic of `Algorithm` (it need not derive from
    it)."""
    if isinstance(algorithm, type):
        raise ValueError(f"algorithm must be an instance: write {algorithm.__name__}(...), not {algorithm.__name__}")
    missing = [m for m in _METHODS if not callable(getattr(algorithm, m, None))]
    missing += [
        a for a in ("download_vectors", "upload_vectors") if not isinstance(getattr(algorithm, a, None), (int, float))
    ]
    if missing:
        raise ValueError(
            f"algorithm must be like fastsam.fed.FedAvg(), got {algorithm!r} without {', '.join(missing)}; "
            "derive its class from fastsam.fed.Algorithm"
        )


def check_server(server: object, like: Tensor, who: str) -> State:
    """Return the server's state. Raises ValueError unless it is a dict of tensors whose "w" is a row like `like`."""
    if not isinstance(server, dict) or not _tensors(server) or "w" not in server:
        raise ValueError(f"{who} must return a dict of tensors with the global model as 'w', got {_kind(server)}")
    w = server["w"]
    if w.shape != like.shape or w.dtype != like.dtype or w.device != like.device:
        raise ValueError(
            f"{who} must return 'w' as {like.dtype} {list(like.shape)} on {like.device}, got {w.dtype} {list(w.shape)} "
            f"on {w.device}"
        )
    return server


def check_finite(server: State, before: State, round: int, server_lr: float) -> None:
    """Raise RuntimeError if a server's state is not finite although the old state was.

    Infinity may stay if the state began with it (the lowest loss so far, for example).
    """
    hint = f"although all that the clients sent is finite; a smaller server_lr (here {server_lr:g}) may help"
    if not _finite(server["w"]):
        raise RuntimeError(f"round {round}: the global model holds NaN or infinity after the server's step, {hint}")
    for name, x in server.items():
        old = before.get(name)
        if x is not old and not _finite(x) and (old is None or _finite(old)):
            raise RuntimeError(
                f"round {round}: {name!r} of the server's state holds NaN or infinity after the server's step, {hint}"
            )


def _finite(x: Tensor) -> bool:
    """Return True if all elements are finite. A finite sum needs no second look, and a sum that is not finite may only
    be
    too large."""
    if x.numel() == 0 or not (x.is_floating_point() or x.is_complex()):
        return True
    return cmath.isfinite(x.sum().item()) or bool(x.isfinite().all())


def not_finite(states: State, before: State, n: int) -> Problems:
    """Return the clients whose new state is not finite although the old state was, with the name of the tensor.

    Tensors of the server or of the old states are not checked again.
    """
    problems: Problems = {}
    for name, x in states.items():
        old = before.get(name)
        if x is old or _finite(x):
            continue
        bad = ~_finite_rows(x, n)
        if old is not None and old.shape == x.shape:
            bad &= _finite_rows(old, n)
        problems = {i: f"its state {name!r} is not finite" for i, one in enumerate(bad.tolist()) if one} | problems
    return problems


def _finite_rows(x: Tensor, n: int) -> Tensor:
    return x.isfinite().reshape(n, -1).all(dim=1)


def check_initial_state(state: State, who: str) -> State:
    """A state to begin with. Raises ValueError for NaN in it: it would never go away."""
    for name, x in state.items():
        if (x.is_floating_point() or x.is_complex()) and bool(x.isnan().any()):
            raise ValueError(f"{who} returned NaN in {name!r}; a state must begin with numbers")
    return state


def check_client(state: object, who: str) -> State:
    """A client's state. Raises ValueError unless it is a dict of tensors."""
    if not isinstance(state, dict) or not _tensors(state):
        raise ValueError(f"{who} must return a client's state as a dict of tensors, got {_kind(state)}")
    return state


def check_updates(made: object, w: Tensor, n: int) -> list[tuple[LocalUpdate, int]]:
    """Return the result of `local_update` for n clients: for each client a LocalUpdate, and the client's row in it.

    Raises:
        ValueError: it is not one LocalUpdate, or n of them, with vectors like the weights `w`.
    """
    if isinstance(made, LocalUpdate):
        return [(_check_step(made, w, n), row) for row in range(n)]
    if not isinstance(made, Sequence) or len(made) != n or not all(isinstance(step, LocalUpdate) for step in made):
        got = f"{len(made)} times {_kind(made[0])}" if isinstance(made, Sequence) and made else _kind(made)
        raise ValueError(
            f"local_update must return a fastsam.fed.LocalUpdate (or a list of {n}, one for each client), got {got}"
        )
    return [(_check_step(step, w, 1), 0) for step in made]


def _check_step(step: LocalUpdate, w: Tensor, n: int) -> LocalUpdate:
    for name in step.constants.vectors:
        v = getattr(step, name)
        if (
            not isinstance(v, Tensor)
            or (v.shape != w.shape and v.shape != (n, *w.shape))
            or (v.dtype, v.device) != (w.dtype, w.device)
        ):
            got = f"{v.dtype} {list(v.shape)} on {v.device}" if isinstance(v, Tensor) else _kind(v)
            raise ValueError(
                f"LocalUpdate.{name} must be {w.dtype} {[n, *w.shape]} (or {list(w.shape)}, one for all {n} clients) "
                f"on {w.device}, like the server's w; got {got}"
            )
    return step


def check_extra(extra: object) -> Mapping[str, Tensor] | None:
    """Return the result of `train_client`. Raises ValueError unless it is a dict of tensors, or None."""
    if extra is not None and not (isinstance(extra, Mapping) and _tensors(extra)):
        raise ValueError(f"train_client must return a dict of tensors, or None, got {_kind(extra)}")
    return extra


def check_finished(closed: object, server: State, n: int) -> tuple[State, Upload]:
    """Return the result of `finish_client` for n clients.

    Raises:
        ValueError: it is not a client's state and an Upload with tensors `[n, ...]`. The state may also have tensors of
            `server`.
    """
    if not isinstance(closed, tuple) or len(closed) != 2 or not isinstance(closed[1], Upload):
        got = f"({', '.join(map(_kind, closed))})" if isinstance(closed, tuple) else _kind(closed)
        raise ValueError(f"finish_client must return (client state, Upload), got {got}")
    state, upload = closed
    for name in ("mean", "sum"):
        vectors = getattr(upload, name)
        if not isinstance(vectors, Mapping) or not _tensors(vectors):
            raise ValueError(f"Upload({name}=...) of finish_client must be a dict of tensors, got {_kind(vectors)}")
        _check_rows(vectors, n, f"Upload({name}=...) of finish_client")
    shared = set(map(id, server.values()))
    own = {name: t for name, t in check_client(state, "finish_client").items() if id(t) not in shared}
    _check_rows(own, n, "the state that finish_client returns")
    return state, upload


def _check_rows(vectors: Mapping[str, Tensor], n: int, what: str) -> None:
    for name, x in vectors.items():
        if x.dim() == 0 or len(x) != n:
            raise ValueError(
                f"{what} must have a row for each of the {n} clients, [{n}, ...]; got {list(x.shape)} for {name!r}. "
                f"A value that is the same for "
                f"all of them becomes rows by x.expand({n}, *x.shape)"
            )


class MutationCheck:
    """Tensors that an algorithm's functions get and must not write, because other clients get the same tensors."""

    def __init__(self) -> None:
        self._lent: list[tuple[str, Tensor, int]] = []

    def lend(self, whose: str, state: State) -> None:
        """Watch the tensors of a state. `whose` is the name of the argument, "server" or "client"."""
        self._lent += [(f"{whose}[{name!r}]", t, t._version) for name, t in state.items()]

    def check(self) -> None:
        """Raises ValueError when one of them was written into."""
        for name, tensor, version in self._lent:
            if tensor._version != version:
                raise ValueError(
                    f"a function of the algorithm wrote into {name}, which is shared; it must return a new tensor "
                    "(x + y in place of x += y or x.add_(y))"
                )


def _tensors(state: Mapping[Any, Any]) -> bool:
    return all(isinstance(t, Tensor) for t in state.values())


def _kind(value: object) -> str:
    """Return the type of a value, for messages. For a dict the values that are not tensors are named too."""
    if isinstance(value, dict):
        other = [f"{name!r}: {type(t).__name__}" for name, t in value.items() if not isinstance(t, Tensor)]
        return f"dict with {', '.join(other[:3])}" if other else f"dict with {', '.join(map(repr, value)) or 'nothing'}"
    return type(value).__name__
