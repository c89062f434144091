"""What a user's own algorithm and measures must keep to: told in words where they do not, as early as it can be
seen."""

from __future__ import annotations

import cmath
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fastsam.fed.aggregation import Rule
from fastsam.fed.algorithms import registry
from fastsam.fed.algorithms.base import Algorithm, State, Upload
from fastsam.fed.step.local_update import VECTORS, LocalUpdate
from fastsam.fed.sums.fixed_point import Problems


class AlgorithmError(ValueError):
    """A method of the algorithm raised; the cause is attached. Rounds count from 1, as in the records."""


def asked(
    algorithm: object, method: str, arguments: Sequence[Any], round: int | None, clients: Sequence[int] = ()
) -> Any:
    """What a method of the algorithm returns. round: from 0, None before the first; clients: those whose rows it gets.

    Raises AlgorithmError for whatever it raises, Ctrl-C apart. A function, because a context manager costs as much as a
    kernel call.
    """
    try:
        return getattr(algorithm, method)(*arguments)
    except Exception as error:
        if round is None and type(error) is ValueError and type(algorithm).__module__.startswith("fastsam."):
            raise  # of ours: it says what is wrong with the options
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


_FEWEST = 3  # clients of a round among whom a majority can stand against one


def check_aggregation(rule: Rule | None, algorithm: object, cohort: int, ranks: int) -> None:
    """Raises ValueError, with what would work, where a robust rule has no meaning. cohort: clients that a round is
    likely to have at most."""
    if rule is None:
        return
    name = type(algorithm).__name__
    if getattr(algorithm, "pools_data", False):
        raise ValueError(
            f"aggregation={rule.name!r} is a rule over clients, and {name} has none: use aggregation='mean'"
        )
    if getattr(algorithm, "uses_sums", False):
        raise no_sums(rule, name)
    if getattr(algorithm, "sends_weights", False):
        raise ValueError(
            f"aggregation={rule.name!r} compares clients that count by the run's weights, and those of {name} send "
            f"weights of their own "
            "(Upload(weight=...)), by which one of them could outweigh the others; use aggregation='mean' with "
            "clip_update=..."
        )
    if ranks > 1:
        raise ValueError(
            f"aggregation={rule.name!r} looks at the rows of all clients of a round, and those of {ranks} processes "
            f"are never together; "
            "use one process, or aggregation='mean'"
        )
    if cohort < _FEWEST:
        raise ValueError(
            f"aggregation={rule.name!r} needs {_FEWEST} clients in a round to tell who is far from the others, and "
            f"this run has rounds of "
            f"{cohort}; use a larger participation, or aggregation='mean'"
        )


def no_sums(rule: Rule, name: str) -> ValueError:
    """The algorithm of that name has sums that no rule can stand in for."""
    served = ", ".join(sorted(one.__name__ for one in registry.values() if _compared(one())))
    return ValueError(
        f"aggregation={rule.name!r} stands in for means, and the server of {name} also keeps a sum of what its clients "
        f"keep "
        f"(Upload(sum=...)), which must hold all of it; use aggregation='mean' with clip_update=..., or one of "
        f"{served}"
    )


def _compared(algorithm: Algorithm) -> bool:
    """Whether whole models of its clients can be compared, and means are all that its server reads."""
    stays = type(algorithm).own_parameters is not Algorithm.own_parameters
    return not (algorithm.uses_sums or algorithm.sends_weights or algorithm.pools_data or stays)


def check_server(server: object, like: Tensor, who: str) -> State:
    """The server's state. Raises ValueError unless it is a dict of tensors whose "w" is a row like the one before."""
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
    """Raises RuntimeError for a server's state that is not finite where it was: it must not take the place of the one
    before.

    Infinity may stay where the state began with it (the lowest loss so far, say).
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
    """A sum that is finite needs no second look; one that is not may be too large only."""
    if x.numel() == 0 or not (x.is_floating_point() or x.is_complex()):
        return True
    return cmath.isfinite(x.sum().item()) or bool(x.isfinite().all())


def not_finite(states: State, before: State, n: int) -> Problems:
    """Which of n clients have a new state, row by row, that is not finite where the one before was, and of what.
    Tensors that are no rows of new ones (those of the server, those of before) are not looked at: they were, when they
    were new."""
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


def check_begin(state: State, who: str) -> State:
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


def check_steps(made: object, w: Tensor, n: int) -> list[tuple[LocalUpdate, int]]:
    """What `local_update` returned for n clients, as a LocalUpdate for each and the client's row in it.

    Raises ValueError unless it is one LocalUpdate, or n of them, with vectors like the weights `w`.
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
    for name in VECTORS:
        v = getattr(step, name)
        if v is None:
            continue
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
    for v in () if step.teacher is None else step.teacher.rows:
        if (
            not isinstance(v, Tensor)
            or (v.shape != w.shape and v.shape != (n, *w.shape))
            or (v.dtype, v.device) != (w.dtype, w.device)
        ):
            got = f"{v.dtype} {list(v.shape)} on {v.device}" if isinstance(v, Tensor) else _kind(v)
            raise ValueError(
                f"Teacher.weights must be {w.dtype} {list(w.shape)} on {w.device}, like the server's w, or "
                f"{[n, *w.shape]}; got {got}"
            )
    if step.then is not None:
        _check_step(step.then, w, n)
    return step


def check_closed(closed: object, server: State, n: int) -> tuple[State, Upload]:
    """What `finish_client` returned for n clients.

    Raises ValueError unless it is a client's state and an Upload, all tensors `[n, ...]`, or in the state also those of
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


def own_weights_of(upload: Upload, sends_weights: bool, n: int, device: torch.device) -> Tensor | None:
    """The weights that n clients send, float64 `[n]`; None for an algorithm whose clients send none.

    Raises ValueError for weights that do not belong to what the algorithm says of itself, are not n, or negative.
    """
    if (upload.weight is not None) != sends_weights:
        raise ValueError(
            "finish_client must return an Upload with a weight in every round if the class says sends_weights = True, "
            "and never otherwise; got "
            f"{'none with' if sends_weights else 'one without'} sends_weights = True"
        )
    if upload.weight is None:
        return None
    weights = torch.as_tensor(upload.weight, dtype=torch.float64, device=device).detach()
    if weights.shape != (n,) or bool((weights < 0).any()):
        raise ValueError(
            f"Upload(weight=...) of finish_client must be a number >= 0 for each of the {n} clients, [{n}]; got "
            f"{weights.tolist() if weights.shape == (n,) else list(weights.shape)}"
        )
    return weights


def _check_rows(vectors: Mapping[str, Tensor], n: int, what: str) -> None:
    for name, x in vectors.items():
        if x.dim() == 0 or len(x) != n:
            raise ValueError(
                f"{what} must have a row for each of the {n} clients, [{n}, ...]; got {list(x.shape)} for {name!r}. "
                f"What is the same for "
                f"all of them becomes rows by x.expand({n}, *x.shape)"
            )


class Unwritten:
    """Tensors that are lent to an algorithm's functions, which must not write into them: others have the same ones."""

    def __init__(self) -> None:
        self._lent: list[tuple[str, Tensor, int]] = []

    def lend(self, whose: str, state: State) -> None:
        """whose: "server" or "client", as the functions call their argument."""
        self._lent += [(f"{whose}[{name!r}]", t, t._version) for name, t in state.items()]

    def check(self) -> None:
        """Raises ValueError when one of them was written into."""
        for name, tensor, version in self._lent:
            if tensor._version != version:
                raise ValueError(
                    f"a function of the algorithm wrote into {name}, which is shared; it must return a new tensor "
                    "(x + y in place of x += y or x.add_(y))"
                )


def numbers(found: Any, who: str, reserved: Container[str]) -> dict[str, float | None]:
    """What a method of the measures returned, as Python's own numbers.

    Raises ValueError unless it is a dict of numbers (or None), under names that are not `reserved`.
    """
    return {
        name: value if value is None or isinstance(value, (int, float)) else _number(value, who, name)
        for name, value in _entries(found, who, reserved)
    }


def rows_of_numbers(found: Any, who: str, reserved: Container[str], n: int) -> dict[str, list[float]]:
    """As `numbers`, of n clients: a list or a tensor of n numbers under each name."""
    made: dict[str, list[float]] = {}
    for name, values in _entries(found, who, reserved):
        if not isinstance(values, (Sequence, Tensor)) or isinstance(values, str) or len(values) != n:
            raise ValueError(
                f"{who} of the measures must return {n} numbers, one for each client, got {_kind(values)} for {name!r}"
            )
        made[name] = [_number(value, who, name) for value in values]
    return made


def _entries(found: Any, who: str, reserved: Container[str]) -> Iterable[tuple[str, Any]]:
    if not isinstance(found, Mapping):
        raise ValueError(f"{who} of the measures must return a dict of numbers, got {_kind(found)}")
    for name in found:
        if name in reserved:
            raise ValueError(f"{who} of the measures returned {name!r}, which the run has already; choose another name")
    return found.items()


def _number(value: Any, who: str, name: str) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"{who} of the measures must return numbers (or None), got {_kind(value)} for {name!r}"
        ) from error


def _tensors(state: Mapping[Any, Any]) -> bool:
    return all(isinstance(t, Tensor) for t in state.values())


def _kind(value: object) -> str:
    """Its type; of a dict also those of its values that are no tensors."""
    if isinstance(value, dict):
        other = [f"{name!r}: {type(t).__name__}" for name, t in value.items() if not isinstance(t, Tensor)]
        return f"dict with {', '.join(other[:3])}" if other else f"dict with {', '.join(map(repr, value)) or 'nothing'}"
    return type(value).__name__
