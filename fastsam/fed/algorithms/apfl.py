"""APFL: Deng, Kamani and Mahdavi, "Adaptive Personalized Federated Learning", arXiv:2003.13461, 2020 (Algorithm 1, and
its rule for alpha)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fastsam.fed.algorithms.base import Algorithm, ClientResults, LocalUpdate, Round, State, Upload
from fastsam.fed.common.checks import number
from fastsam.fed.step.mixture import Mixture


@dataclass(frozen=True)
class APFL(Algorithm):
    """FedAvg, and each client's own model, a mixture of the shared model and of a v_i that only this client trains.

        u = alpha_i*v_i + (1 - alpha_i)*w_i
        v_i <- v_i - lr * alpha_i*grad f_i(u),   w_i <- w_i - lr * grad f_i(w_i)         in each local step, on one
        batch, from one point alpha_i <- clip(alpha_i - eta_alpha*<v_i - w_i, grad f_i(u)>, 0, 1)              in the
        first step of a round

    Own models are u with the global w. alpha: the first alpha_i, ours by choice; eta_alpha: None for the round's lr, as
    in the paper, 0 for an alpha that stays. v_i begins as the first model that the client receives. The run's momentum
    and weight decay are those of both. Per round and client 1 P down and 1 P up; state: w, and v_i and alpha_i on every
    client. Two back-propagations a step.
    """

    client_vectors: ClassVar[float] = 1
    working_vectors: ClassVar[float] = 2
    backward_passes: ClassVar[int] = 2
    own_models: ClassVar[bool] = True

    alpha: float = 0.5
    eta_alpha: float | None = None

    def __post_init__(self) -> None:
        number("alpha", self.alpha, at_least=0, at_most=1)
        if self.eta_alpha is not None:
            number("eta_alpha (None for the local learning rate)", self.eta_alpha, at_least=0)

    def init_client(self, server: State) -> State:
        w = server["w"]
        return {"v_i": w, "alpha": torch.full((1,), self.alpha, dtype=torch.float64, device=w.device)}

    def local_update(self, server: State, client: State, round: Round) -> LocalUpdate:
        rate = round.lr if self.eta_alpha is None else self.eta_alpha
        return LocalUpdate(beside=client["v_i"], mixture=Mixture(client["alpha"].flatten(), rate))

    def finish_client(self, server: State, client: State, results: ClientResults, round: Round) -> tuple[State, Upload]:
        assert results.inner is not None and results.alpha is not None  # local_update asked for a mixture
        state = {"v_i": client["v_i"] + results.inner, "alpha": results.alpha[:, None]}
        return state, Upload(mean={"delta": results.delta})

    def own_model(self, server: State, client: State) -> Tensor:
        return server["w"].lerp(client["v_i"], client["alpha"].to(server["w"].dtype))
