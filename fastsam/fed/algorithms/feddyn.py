"""FedDyn: Acar, Zhao, Navarro, Mattina, Whatmough and Saligrama, "Federated Learning Based on Dynamic Regularization",
ICLR 2021 (Algorithm 1)."""

from __future__ import annotations

from dataclasses import dataclass

from fastsam.fed.algorithms.base import LocalUpdate, Round, State
from fastsam.fed.algorithms.dynamic import DynamicRegularizer, attraction, check_phi


@dataclass(frozen=True)
class FedDyn(DynamicRegularizer):
    """Local SGD on a loss with a linear and a proximal term that move its minimum to the global one.

        w <- w - lr * (g + phi*(h_i + w - w^t) + weight_decay*w)        h_i = -lambda_i/phi of the paper
        h_i <- h_i + (w_i - w^t),    H <- H + 1/N * sum_i (w_i - w^t)
        w^{t+1} = w^t + mean_i (w_i - w^t) + H                          with the new H

    phi is the paper's alpha. N counts all clients, so that H is always the mean of all h_i. The server has no learning
    rate: a run's server_lr must be 1. phi -> 0 is not FedAvg, because H stays. phi_decay is a factor on phi after each
    round. (Fan et al. 2024 write that they decay phi; their code decays lr, as the run's lr_decay does.) Per round and
    client 1 P down and 1 P up; state: w, H, and h_i on every client. One backward pass a step.
    """

    phi: float = 0.1
    phi_decay: float = 1.0

    def __post_init__(self) -> None:
        check_phi(self.phi, self.phi_decay)

    def local_update(self, server: State, client: State, round: Round) -> LocalUpdate:
        phi = self.phi_of(round)
        return LocalUpdate(gradient_offset=attraction(phi, server, client), proximal_coefficient=phi)
