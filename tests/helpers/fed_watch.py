"""An algorithm that delegates to another algorithm and stores its arguments and results."""

from typing import Any

from torch import Tensor

from fastsam import fed
from fastsam.fed import State


class Watched:
    """An algorithm that delegates to `inner`. It copies nothing, because an algorithm must not write its arguments.

    Attributes:
        _servers: the server's states, beginning with the initial state.
        _kept: per client, pairs of a round and the state after it.
        _steps: all local updates.
        _ends: in the order of training, the round, the client's result (a `ClientResults` of one) and the server's
            state that it had received.
    """

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self._servers: list[dict[str, Any]] = []
        self._kept: dict[int, list[tuple[int, dict[str, Any]]]] = {}
        self._steps: list[Any] = []
        self._ends: list[tuple[int, Any, dict[str, Any]]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._inner, name)

    @property
    def _clients(self) -> dict[int, dict[str, Any]]:
        """Return the last state of each client, by id."""
        return {client: states[-1][1] for client, states in self._kept.items()}

    def init_server(self, w0: Tensor) -> State:
        self._servers = [self._inner.init_server(w0)]
        return self._servers[0]

    def local_update(self, server: State, client: State, round: fed.Round) -> fed.LocalUpdate:
        self._steps.append(self._inner.local_update(server, client, round))
        return self._steps[-1]

    def finish_client(
        self, server: State, client: State, results: fed.ClientResults, round: fed.Round
    ) -> tuple[State, fed.Upload]:
        state, upload = self._inner.finish_client(server, client, results, round)
        server_ids = {id(t) for t in server.values()}
        for i, number in enumerate(results.client_ids):
            state_of_client = {name: t if id(t) in server_ids else t[i] for name, t in state.items()}
            self._kept.setdefault(number, []).append((round.index, state_of_client))
            self._ends.append((round.index, results.take([i]), server))
        return state, upload

    def step_server(self, server: State, aggregate: Any, round: fed.Round) -> State:
        self._servers.append(self._inner.step_server(server, aggregate, round))
        return self._servers[-1]
