"""FedLESAM: Fan, Hu, Yao, Niu, Zhang, Sugiyama and Wang, "Locally Estimated Global Perturbations are Better than Local
Perturbations for Federated Sharpness-aware Minimization", ICML 2024 (Algorithm 1)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fastsam.fed.algorithms.base import LocalUpdate, Round, State
from fastsam.fed.algorithms.estimate import LocalEstimate
from fastsam.fed.algorithms.schedule import Scheduled


@dataclass(frozen=True)
class FedLESAM(LocalEstimate):
    """SAM steps at the price of SGD: the perturbation is where the global model came from.

        eps = rho * (w_old_i - w^t)/||w_old_i - w^t||      once per round
        w <- w - lr * (g + weight_decay*w),  g the batch gradient at w + eps
        w_old_i <- w^t after the round, in clients that took part;  the server's step is FedAvg's

    The released optimizer shifts every tensor by a constant instead of along this direction; this is the paper's rule.
    Per round and client 1 P down and 1 P up; state: w, and w_old_i on every client (clients of one round share it). One
    back-propagation a step.

    Args:
        rho: a number or a schedule.
        initial_perturbation: for a client without w_old_i, "origin" takes w_old_i = 0 (the paper), "none" does not
            perturb (the authors' code, in round 0).
        reference: "client" as above (the paper), or "last_round", w^{t-1} for all clients (the authors' code; 1 P more
            down).
    """

    working_vectors: ClassVar[float] = 1

    rho: Scheduled = 0.01
    initial_perturbation: str = "origin"
    reference: str = "client"

    def __post_init__(self) -> None:
        self.check_estimate()

    def local_update(self, server: State, client: State, round: Round) -> LocalUpdate:
        return self.estimate_step(server, client, round)
