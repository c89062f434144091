"""FedLESAM-S: Fan, Hu, Yao, Niu, Zhang, Sugiyama and Wang, "Locally Estimated Global Perturbations are Better than
Local Perturbations for Federated Sharpness-aware Minimization", ICML 2024 (Algorithm 3)."""

from __future__ import annotations

from dataclasses import dataclass

from fastsam.fed.algorithms.base import LocalUpdate, Round, State
from fastsam.fed.algorithms.control import ControlVariates
from fastsam.fed.algorithms.estimate import LocalEstimate
from fastsam.fed.algorithms.schedule import Scheduled
from fastsam.fed.common.checks import number


@dataclass(frozen=True)
class FedLESAM_S(LocalEstimate, ControlVariates):  # type: ignore[override]
    """FedLESAM's perturbation in SCAFFOLD.

        w <- w - lr * (g + control_scale*(c - c_i) + weight_decay*w),  g the batch gradient at w + eps, eps as in
        FedLESAM
        c_i, c: as in SCAFFOLD;  w_old_i <- w^t

    rho = 0 is SCAFFOLD. The paper's listing has `- (c - c_i)` with gradient-signed c, and a mean of the c_i over
    the active clients in place of the sum of their changes over N. Its code and SCAFFOLD have the equations above.
    control_scale is 1 in the paper and 0.1 in its code. rho, initial_perturbation, reference: see FedLESAM.
    Per round and client 2 P down and 2 P up; state: w, c, and c_i, w_old_i on every client. One backward pass a
    step.
    """

    rho: Scheduled = 0.1
    initial_perturbation: str = "origin"
    reference: str = "client"
    control_scale: float = 1.0

    def __post_init__(self) -> None:
        self.check_estimate()
        number("control_scale", self.control_scale, at_least=0)

    def local_update(self, server: State, client: State, round: Round) -> LocalUpdate:
        return self.estimate_step(
            server, client, round, gradient_offset=self.control_scale * self.correction(server, client)
        )
