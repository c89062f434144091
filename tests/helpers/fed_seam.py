"""Algorithms and an executor that fastsam does not know."""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from fastsam import fed
from fastsam.fed import State, executors
from fastsam.fed.algorithms import apply_update
from fastsam.fed.executors.sequential import Sequential


@dataclass(frozen=True)
class Scaffold:
    """Control variates, on the server and on every client. Derives from nothing."""

    download_vectors: ClassVar[float] = 2
    upload_vectors: ClassVar[float] = 2
    rho: float | None = None

    def init_server(self, w0: Tensor) -> State:
        return {"w": w0, "c": torch.zeros_like(w0)}

    def init_client(self, server: State) -> State:
        return {"c_i": torch.zeros_like(server["w"])}

    def local_step(self, server: State, client: State, round: fed.Round) -> fed.Step:
        q = server["c"] - client["c_i"]
        return fed.Step(q=q) if self.rho is None else fed.SAM(rho=self.rho, q=q)

    def finish(
        self, server: State, client: State, results: fed.ClientResults, round: fed.Round
    ) -> tuple[State, fed.Upload]:
        fresh = client["c_i"] - server["c"] - results.delta / results.column(round.lr * K for K in results.num_steps)
        return {"c_i": fresh}, fed.Upload(mean={"delta": results.delta}, sum={"dc": fresh - client["c_i"]})

    def step_server(self, server: State, aggregate: Any, round: fed.Round) -> State:
        return {
            "w": apply_update(server["w"], round.server_lr * aggregate.mean("delta")),
            "c": apply_update(server["c"], aggregate.sum("dc") / round.num_clients),
        }


@dataclass(frozen=True)
class Constants(fed.Algorithm):
    """Local steps of a class with these fields. A function among them gets the row of the global model and its
    layout."""

    kind: type[fed.Step] = fed.Step
    values: dict[str, Any] = field(default_factory=dict)

    def local_step(self, server: State, client: State, round: fed.Round) -> fed.Step:
        return self.kind(
            **{name: v(server["w"], round.layout) if callable(v) else v for name, v in self.values.items()}
        )


class Reordered(executors.Executor):
    """The plain executor with a different order of clients every time, for its place in the registry."""

    def __init__(self, setup: executors.Setup) -> None:
        self.setup, self.inner = setup, Sequential(setup)

    def train(self, start: Any, buffers: Any, tasks: Any) -> Iterator[Any]:
        tasks = list(tasks)
        random.shuffle(tasks)
        results = list(self.inner.train(start, buffers, tasks))
        random.shuffle(results)
        return iter(results)
