"""Ditto: Li, Hu, Beirami and Smith, "Ditto: Fair and Robust Federated Learning Through Personalization", ICML 2021
(Algorithm 1); https://github.com/litian96/ditto."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fastsam.fed.algorithms.base import Algorithm, ClientResults, LocalUpdate, Round, State, Upload
from fastsam.fed.common.checks import integer, number


@dataclass(frozen=True)
class Ditto(Algorithm):
    """FedAvg, and beside it a model v_i of each client, trained on the same batches and held to the global one.

        v_i <- v_i - lr * (grad f_i(v_i) + lam*(v_i - w^t))     in each local step of a round in which client i takes
        part

    v_i begins as the first model that the client receives. epochs: passes over its data for v_i; None: the run's local
    work. Per round and client 1 P down and 1 P up; state: w, and v_i on every client. Two back-propagations for each
    local step of w.
    """

    client_vectors: ClassVar[float] = 1
    working_vectors: ClassVar[float] = 2
    backward_passes: ClassVar[int] = 2
    own_models: ClassVar[bool] = True

    lam: float = 1.0
    epochs: int | None = None

    def __post_init__(self) -> None:
        number("lam", self.lam, at_least=0)
        if self.epochs is not None:
            integer("epochs", self.epochs, at_least=1)

    def init_client(self, server: State) -> State:
        return {"v_i": server["w"]}

    def local_update(self, server: State, client: State, round: Round) -> LocalUpdate:
        own = LocalUpdate(
            start=client["v_i"],
            proximal_coefficient=self.lam,
            gradient_offset=-self.lam * server["w"],
            epochs=self.epochs,
        )
        return LocalUpdate(then=own)

    def finish_client(self, server: State, client: State, results: ClientResults, round: Round) -> tuple[State, Upload]:
        assert results.then is not None  # of the phase that local_update asked for
        return {"v_i": client["v_i"] + results.then.delta}, Upload(mean={"delta": results.delta})

    def own_model(self, server: State, client: State) -> Tensor:
        return client["v_i"]
