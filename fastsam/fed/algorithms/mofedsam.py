"""MoFedSAM: Qu, Li, Duan, Liu, Tang and Lu, "Generalized Federated Learning via Sharpness Aware Minimization", ICML
2022 (eq. 6)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fastsam.fed.algorithms.base import Direction, LocalUpdate, Round, State
from fastsam.fed.algorithms.momentum import COUNTS, ServerDirection
from fastsam.fed.algorithms.schedule import Scheduled, check_scheduled, value_at
from fastsam.fed.common.checks import choice, number


@dataclass(frozen=True)
class MoFedSAM(ServerDirection):
    """FedSAM whose local steps follow the last round's global direction D as well.

        v = beta*g2 + (1 - beta)*D^t,  g2 as in FedSAM;  w <- w - lr * (v + weight_decay*w)
        D^{t+1} = -mean_i (w_i - w^t)/(lr_t*K_i),  D^0 = 0;  the server's step is FedAvg's

    beta = 1 is FedSAM; in round 0 a step is beta times FedSAM's. The paper writes the server's step as
    `w - server_lr*D`, which is the plain mean only if `lr*K = 1`. We use the plain mean, as the authors' and the
    simulators' code does. rho is a number or a schedule.

    momentum_K: K_i counts a client's true local "steps", or its local "epochs": with the paper's 10 epochs and lr 0.1
    the latter makes its literal formula the plain mean, and D several times larger.
    Per round and client 2 P down (w, D) and 1 P up; state: w, D. Two backward passes a step.
    """

    working_vectors: ClassVar[float] = 2
    backward_passes: ClassVar[int] = 2

    rho: Scheduled = 0.05
    beta: float = 0.1
    momentum_K: str = "steps"

    def __post_init__(self) -> None:
        check_scheduled("rho", self.rho)
        number("beta", self.beta, at_least=0, at_most=1)
        choice("momentum_K", self.momentum_K, COUNTS)

    def local_update(self, server: State, client: State, round: Round) -> LocalUpdate:
        rho = value_at("rho", self.rho, round)
        return LocalUpdate(
            Direction.GRADIENT, rho=rho, perturbed_weight=self.beta, gradient_offset=(1 - self.beta) * server["D"]
        )
