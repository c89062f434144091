"""The calls of an algorithm's methods in a run: `Contract` for the algorithms of fastsam, `CheckedContract` for all
others (see `fastsam.fed.loop.checked_contract`).

Tests run the algorithms of fastsam through both (tests/fed/loop/test_algorithm_calls.py).
"""

from __future__ import annotations

import cmath
import re
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from fastsam.fed.algorithms import registry
from fastsam.fed.algorithms.base import Aggregate, Algorithm, Round, State, Upload, has_loop
from fastsam.fed.common.checks import nearest
from fastsam.fed.executors.base import ClientError
from fastsam.fed.executors.client import Client
from fastsam.fed.sums.fixed_point import Problems
from fastsam.fed.update.results import ClientResults
from fastsam.fed.update.steps import Step

_METHODS = ("init_server", "init_client", "local_step", "finish", "step_server")
_GONE = {
    "local_update": "local_step",
    "finish_client": "finish",
}  # methods that algorithms had, and what took their place

_FLOAT64 = (
    ". Means and sums of an aggregate are float64. Write server['w'].double(), or "
    "aggregate.mean(name).to(server['w'].dtype)"
)


class AlgorithmError(ValueError):
    """A method of the algorithm raised; the cause is attached. Rounds count from 1, as in the records."""


class Contract:
    """Calls of the methods of an algorithm. Exceptions become AlgorithmErrors; returned values are used as they are.

    `local_step` and `finish_clients` call the algorithm's `local_step` and `finish` for n clients at once.
    """

    checks_steps = False  # a step is tried before round 1

    def __init__(self, algorithm: Algorithm) -> None:
        self.algorithm = algorithm
        self.sends_weights = bool(getattr(algorithm, "sends_weights", False))
        self.has_loop = has_loop(algorithm)

    def call(self, method: str, arguments: Sequence[Any], round: int | None = None, clients: Sequence[int] = ()) -> Any:
        """Call a method of the algorithm and return its result. `round` is None before the first round, `clients` are
        the clients whose rows it gets.

        Raises:
            AlgorithmError: the method raised an exception.
            ClientError: the model or the loss raised in a loop of the algorithm.
        """
        try:  # not a context manager, which costs as much as a kernel call
            return getattr(self.algorithm, method)(*arguments)
        except ClientError:
            raise
        except Exception as error:
            name = type(self.algorithm).__name__
            if round is None and type(error) is ValueError and type(self.algorithm).__module__.startswith("fastsam."):
                raise  # an error of fastsam names the wrong option
            place = "before round 1" if round is None else f"in round {round + 1}"
            if clients:
                id_list = ", ".join(map(str, clients[:8])) + (", ..." if len(clients) > 8 else "")
                place += f", client{'s' if len(clients) > 1 else ''} {id_list}"
            kind = "" if type(error) is ValueError else f"{type(error).__name__}: "
            text = error.args[0] if isinstance(error, KeyError) and error.args else error  # which would be quoted
            hint = _FLOAT64 if method == "step_server" and _mixes_dtypes(error) else ""
            raise AlgorithmError(f"{name}.{method} failed {place}: {kind}{text}{hint}") from error

    def init_server(self, w0: Tensor) -> State:
        """Return the server's state before the first round."""
        return self.call("init_server", (w0,))

    def init_client(self, server: State, round: Round | None = None, client_ids: Sequence[int] = ()) -> State:
        """Return the state of new clients, which they share. `round` is None before the first round."""
        return self.call("init_client", (server,), None if round is None else round.index, client_ids)

    def local_step(self, server: State, client: State, n: int, round: Round, client_ids: Sequence[int] = ()) -> Step:
        """Return the local step of n clients with the states `client`, `[n, ...]`; without ids in the trial."""
        return self.call("local_step", (server, client, round), round.index if client_ids else None, client_ids)

    def train_client(
        self, server: State, state: State, round: Round, client: Client, is_trial: bool = False
    ) -> Mapping[str, Tensor] | None:
        """Do the local work of a client in the loop of the algorithm, and return its extra results."""
        clients = [] if is_trial else [client.id]
        return self.call("train_client", (client, server, state, round), None if is_trial else round.index, clients)

    def finish_clients(
        self, server: State, states: Sequence[State], client: State, results: ClientResults, round: Round
    ) -> tuple[State, Upload]:
        """Return the new states of n clients, `[n, ...]`, and their upload. `client` holds `states` as rows."""
        return self.call("finish", (server, client, results, round), round.index, results.client_ids)

    def step_server(self, server: State, aggregate: Aggregate, round: Round) -> State:
        """Return the server's state after the round."""
        return self.call("step_server", (server, aggregate, round), round.index)


def _mixes_dtypes(error: Exception) -> bool:
    """Return True if torch refused to combine float32 and float64."""
    words = re.findall(r"[a-z]+", str(error).lower())
    return isinstance(error, RuntimeError) and {"float", "double"} <= set(words)


def check_algorithm(algorithm: object) -> None:
    """Raise ValueError unless `algorithm` has the methods and the traffic of `Algorithm`."""
    if isinstance(algorithm, str):
        names = {name: algorithm_type.__name__ for name, algorithm_type in registry.items()}
        cls = names.get(algorithm.lower().replace("_", "-"))
        hint = f"write fed.{cls}()" if cls else f"fed.FedAvg() is one{nearest(algorithm, [*names, *names.values()])}"
        raise ValueError(f"algorithm must be an object, got the name {algorithm!r}: {hint}")
    if isinstance(algorithm, type):
        raise ValueError(f"algorithm must be an instance: write {algorithm.__name__}(...), not {algorithm.__name__}")
    for old, new in _GONE.items():
        if hasattr(algorithm, old):
            raise ValueError(
                f"{type(algorithm).__name__}.{old} is not called any more. Write {new}, as docs/own_algorithm.md does"
            )
    absent = [m for m in _METHODS if not callable(getattr(algorithm, m, None))]
    absent += [
        a for a in ("download_vectors", "upload_vectors") if not isinstance(getattr(algorithm, a, None), (int, float))
    ]
    if absent:
        raise ValueError(
            f"algorithm must be like fastsam.fed.FedAvg(), got {algorithm!r} without {', '.join(absent)}; derive its "
            "class from fastsam.fed.Algorithm"
        )


def check_initial_state(state: State, method: str) -> State:
    """Return a state to begin with. Raises ValueError for NaN in it, because it would never go away."""
    for name, x in state.items():
        if (x.is_floating_point() or x.is_complex()) and bool(x.isnan().any()):
            raise ValueError(f"{method} returned NaN in {name!r}; a state must begin with numbers")
    return state


def check_finite(server: State, old_state: State, round: int, server_lr: float) -> None:
    """Raise RuntimeError if a server's state is not finite although the old state was.

    Infinity may stay if the state began with it (the lowest loss so far, for example).
    """
    for name, x in server.items():
        old = old_state.get(name)
        if x is not old and not _is_finite(x) and (name == "w" or old is None or _is_finite(old)):
            subject = "the global model" if name == "w" else f"{name!r} of the server's state"
            raise RuntimeError(
                f"round {round}: {subject} holds NaN or infinity after the server's step, although all that the "
                f"clients sent is finite; a smaller server_lr (here {server_lr:g}) may help"
            )


def _is_finite(x: Tensor) -> bool:
    """Return True if all elements are finite. A sum that is not finite may only be too large."""
    if x.numel() == 0 or not (x.is_floating_point() or x.is_complex()):
        return True
    return cmath.isfinite(x.sum().item()) or bool(x.isfinite().all())


def not_finite(states: State, old_state: State, n: int) -> Problems:
    """Return the clients whose new state is not finite although the old state was, with the name of the tensor.

    Tensors of the server or of the old states are not checked again.
    """
    problems: Problems = {}
    for name, x in states.items():
        old = old_state.get(name)
        if x is old or _is_finite(x):
            continue
        bad = ~_finite_rows(x, n)
        if old is not None and old.shape == x.shape:
            bad &= _finite_rows(old, n)
        problems = {i: f"its state {name!r} is not finite" for i, one in enumerate(bad.tolist()) if one} | problems
    return problems


def _finite_rows(x: Tensor, n: int) -> Tensor:
    return x.isfinite().reshape(n, -1).all(dim=1)
