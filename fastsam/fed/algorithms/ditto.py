"""Ditto: Li, Hu, Beirami and Smith, "Ditto: Fair and Robust Federated Learning Through Personalization", ICML 2021
(Algorithm 1); https://github.com/litian96/ditto."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fastsam.fed.algorithms.base import Algorithm, Client, ClientResults, Round, State, Step, Upload, hparam
from fastsam.fed.common.checks import integer, number


@dataclass(frozen=True)
class Ditto(Algorithm):
    """FedAvg, and a second model v_i of each client, trained on the same batches with a proximal term.

        v_i <- v_i - lr * (grad f_i(v_i) + lam*(v_i - w^t))     in each local step

    v_i begins as the first model that the client receives. Per round and client 1 P down and 1 P up; state: w, and v_i
    on every client. Two backward passes for each local step of w.

    Args:
        lam: weight of the proximal term.
        epochs: passes over the client's data for v_i; None for the run's local work.
    """

    own_models: ClassVar[bool] = True

    lam: float = hparam(1.0, number, at_least=0)
    epochs: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.epochs is not None:
            integer("epochs", self.epochs, at_least=1)

    def init_client(self, server: State) -> State:
        return {"v_i": server["w"]}

    def train_client(self, client: Client, server: State, state: State, round: Round) -> Mapping[str, Tensor]:
        for x, y in client.batches():
            client.step(x, y)
        proximal = Step(prox=self.lam, q=-self.lam * server["w"])
        client.begin(state["v_i"], proximal)
        for x, y in client.batches(self.epochs):
            client.step(x, y)
        return {"delta_v": client.delta}

    def finish(self, server: State, client: State, results: ClientResults, round: Round) -> tuple[State, Upload]:
        return {"v_i": client["v_i"] + results.extra["delta_v"]}, Upload(mean={"delta": results.delta})

    def own_model(self, server: State, client: State) -> Tensor:
        return client["v_i"]
