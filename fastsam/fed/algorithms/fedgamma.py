"""FedGAMMA: Dai, Yang, Sun, Tian, Cao and Zhou, "FedGAMMA: Federated Learning with Global Sharpness-Aware
Minimization", IEEE TNNLS 2023."""

from __future__ import annotations

from dataclasses import dataclass

from fastsam.fed.algorithms.base import SAM, Round, State, Step, hparam
from fastsam.fed.algorithms.scaffold import SCAFFOLD
from fastsam.fed.algorithms.schedule import Scheduled, check_scheduled, value_at


@dataclass(frozen=True)
class FedGAMMA(SCAFFOLD):
    """SCAFFOLD on SAM gradients.

        w <- w - lr * (g2 + c - c_i + weight_decay*w),    g2 as in FedSAM
        c_i and c as in SCAFFOLD

    The perturbation follows the uncorrected batch gradient, with the norm over the whole model. Per round and client 2
    P down and 2 P up; state: w, c, and c_i on every client. Two backward passes a step.

    Args:
        rho: radius of the perturbation, a number or a schedule; 0 is SCAFFOLD.
    """

    rho: Scheduled = hparam(0.1, check_scheduled)

    def local_step(self, server: State, client: State, round: Round) -> Step:
        rho = value_at("rho", self.rho, round)
        return SAM(rho=rho, q=self.correction(server, client))
