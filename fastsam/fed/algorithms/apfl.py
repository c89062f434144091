"""APFL: Deng, Kamani and Mahdavi, "Adaptive Personalized Federated Learning", arXiv:2003.13461, 2020 (Algorithm 1, and
its rule for alpha)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fastsam.fed.algorithms.base import Algorithm, Client, ClientResults, Round, State, Upload, hparam
from fastsam.fed.common.checks import number


@dataclass(frozen=True)
class APFL(Algorithm):
    """FedAvg, and for each client a mixture u of the shared model w_i and a private model v_i.

        u       = alpha_i*v_i + (1 - alpha_i)*w_i
        v_i     <- v_i - lr * alpha_i*grad f_i(u)                                  in each local step
        w_i     <- w_i - lr * grad f_i(w_i)                                        on the same batch
        alpha_i <- clip(alpha_i - eta_alpha*<v_i - w_i, grad f_i(u)>, 0, 1)        in the first step of a round

    A client's model is u with the global w. v_i begins as the first model that the client receives. The run's momentum
    and weight decay apply to both models. Per round and client 1 P down and 1 P up; state: w, and v_i and alpha_i on
    every client. Two backward passes a step.

    Args:
        alpha: the first alpha_i. The default is our choice.
        eta_alpha: learning rate of alpha_i; None for the round's lr, as in the paper; 0 for a constant alpha_i.
    """

    own_models: ClassVar[bool] = True

    alpha: float = hparam(0.5, number, at_least=0, at_most=1)
    eta_alpha: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.eta_alpha is not None:
            number("eta_alpha (None for the local learning rate)", self.eta_alpha, at_least=0)

    def init_client(self, server: State) -> State:
        w = server["w"]
        return {"v_i": w, "alpha": torch.full((1,), self.alpha, dtype=torch.float64, device=w.device)}

    def train_client(self, client: Client, server: State, state: State, round: Round) -> Mapping[str, Tensor]:
        eta_alpha = round.lr if self.eta_alpha is None else self.eta_alpha
        v, alpha = client.second_model(state["v_i"]), state["alpha"]
        for step, (x, y) in enumerate(client.batches()):
            w, alpha_before = client.w.clone(), alpha[0]
            client.w = w.lerp(v.w, alpha.to(w.dtype))
            gradients = client.gradient(x, y)
            client.w = w
            if step == 0 and eta_alpha:
                alpha = (alpha - eta_alpha * client.dot(gradients, v.w - w)).clamp(0, 1)
            v.update(gradients, alpha_before)
            client.step(x, y)
        return {"delta_v": v.w - state["v_i"], "alpha": alpha}

    def finish(self, server: State, client: State, results: ClientResults, round: Round) -> tuple[State, Upload]:
        state = {"v_i": client["v_i"] + results.extra["delta_v"], "alpha": results.extra["alpha"]}
        return state, Upload(mean={"delta": results.delta})

    def own_model(self, server: State, client: State) -> Tensor:
        return server["w"].lerp(client["v_i"], client["alpha"].to(server["w"].dtype))
