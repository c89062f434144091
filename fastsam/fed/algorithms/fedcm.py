"""FedCM: Xu, Wang, Wang and Yao, "FedCM: Federated Learning with Client-level Momentum", arXiv 2106.10874, 2021
(Algorithm 2)."""

from __future__ import annotations

from dataclasses import dataclass

from fastsam.fed.algorithms.base import LocalUpdate, Round, State
from fastsam.fed.algorithms.momentum import COUNTS, ServerDirection
from fastsam.fed.common.checks import choice, number


@dataclass(frozen=True)
class FedCM(ServerDirection):
    """Local steps that follow the last round's global direction D as well.

        w <- w - lr * (alpha*g + (1 - alpha)*D^t + weight_decay*w)
        D^{t+1} = -mean_i (w_i - w^t)/(lr_t*K_i),  D^0 = 0;  the server's step is FedAvg's

    alpha = 1 is FedAvg; in round 0 a step is alpha times FedAvg's. The paper writes the server's step as
    `w - server_lr*D`, which is the plain mean only if `lr*K = 1`. We use the plain mean, as the simulators do.
    momentum_K: K_i counts local "steps" or local "epochs".
    Per round and client 2 P down (w, D) and 1 P up; state: w, D. One backward pass a step.
    """

    alpha: float = 0.1
    momentum_K: str = "steps"

    def __post_init__(self) -> None:
        number("alpha", self.alpha, at_least=0, at_most=1)
        choice("momentum_K", self.momentum_K, COUNTS)

    def local_update(self, server: State, client: State, round: Round) -> LocalUpdate:
        return LocalUpdate(perturbed_weight=self.alpha, gradient_offset=(1 - self.alpha) * server["D"])
