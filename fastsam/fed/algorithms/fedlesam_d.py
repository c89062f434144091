"""FedLESAM-D: Fan, Hu, Yao, Niu, Zhang, Sugiyama and Wang, "Locally Estimated Global Perturbations are Better than
Local Perturbations for Federated Sharpness-aware Minimization", ICML 2024 (Algorithm 4)."""

from __future__ import annotations

from dataclasses import dataclass

from fastsam.fed.algorithms.base import LocalUpdate, Round, State
from fastsam.fed.algorithms.dynamic import DynamicRegularizer, attraction, check_phi
from fastsam.fed.algorithms.estimate import LocalEstimate
from fastsam.fed.algorithms.schedule import Scheduled


@dataclass(frozen=True)
class FedLESAM_D(LocalEstimate, DynamicRegularizer):  # type: ignore[override]
    """FedLESAM's perturbation in FedDyn.

        w <- w - lr * (g + phi*(h_i + w - w^t) + weight_decay*w),  g the batch gradient at w + eps, eps as in FedLESAM
        h_i, H and w^{t+1}: as in FedDyn;  w_old_i <- w^t

    rho = 0 is FedDyn. phi is the paper's 1/beta, and phi_decay a factor on it after each round. FedDyn and the
    paper's code have these equations. The paper's listing has the opposite sign of the dual, leaves it out of
    the server's step, and divides by the active clients.
    rho, initial_perturbation, reference: see FedLESAM. The run's server_lr must be 1, as in FedDyn.
    Per round and client 1 P down and 1 P up; state: w, H, and h_i, w_old_i on every client. One backward pass a
    step.
    """

    rho: Scheduled = 0.1
    phi: float = 0.1
    initial_perturbation: str = "origin"
    reference: str = "client"
    phi_decay: float = 1.0

    def __post_init__(self) -> None:
        self.check_estimate()
        check_phi(self.phi, self.phi_decay)

    def local_update(self, server: State, client: State, round: Round) -> LocalUpdate:
        phi = self.phi_of(round)
        return self.estimate_step(
            server, client, round, gradient_offset=attraction(phi, server, client), proximal_coefficient=phi
        )
