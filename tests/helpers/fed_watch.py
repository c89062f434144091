"""An algorithm that delegates to another algorithm and stores its arguments and results."""

from typing import Any

from torch import Tensor

from fastsam import fed
from fastsam.fed import State


class Watched:
    """An algorithm that delegates to `inner`. It copies nothing, because an algorithm must not write its arguments.

    Attributes:
        _servers: the server's states, beginning with the initial state.
        _clients: the last state of each client, by id.
        _steps: all local steps.
    """

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self._servers: list[dict[str, Any]] = []
        self._clients: dict[int, dict[str, Any]] = {}
        self._steps: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._inner, name)

    def init_server(self, w0: Tensor) -> State:
        self._servers = [self._inner.init_server(w0)]
        return self._servers[0]

    def local_step(self, server: State, client: State, round: fed.Round) -> fed.Step:
        self._steps.append(self._inner.local_step(server, client, round))
        return self._steps[-1]

    def finish(
        self, server: State, client: State, results: fed.ClientResults, round: fed.Round
    ) -> tuple[State, fed.Upload]:
        state, upload = self._inner.finish(server, client, results, round)
        server_ids = {id(t) for t in server.values()}
        for i, number in enumerate(results.client_ids):
            self._clients[number] = {name: t if id(t) in server_ids else t[i] for name, t in state.items()}
        return state, upload

    def step_server(self, server: State, aggregate: Any, round: fed.Round) -> State:
        self._servers.append(self._inner.step_server(server, aggregate, round))
        return self._servers[-1]
