"""FedSAM and MoFedSAM: Qu, Li, Duan, Liu, Tang and Lu, "Generalized Federated Learning via Sharpness Aware
Minimization", ICML 2022 (eq. 4 and 6, Algorithm 1). ASAM: Kwon, Kim, Park and Choi, "ASAM: Adaptive Sharpness-Aware
Minimization", ICML 2021 (eq. 9)."""

from __future__ import annotations

from dataclasses import dataclass

from fastsam.fed.algorithms.base import SAM, Algorithm, Round, State, Step, hparam
from fastsam.fed.algorithms.fedcm import COUNTS, ServerDirection
from fastsam.fed.algorithms.schedule import Scheduled, check_scheduled, value_at
from fastsam.fed.common.checks import choice, number


@dataclass(frozen=True)
class FedSAM(Algorithm):
    """Local SAM steps, the server as in FedAvg.

        eps = rho * g1/||g1||,  g1 the batch gradient at w, the norm over the whole model
        w <- w - lr * (g2 + weight_decay*w),  g2 the gradient of the same batch at w + eps

    The paper's eq. 3 multiplies by a further sign(g1) and its server uses the displacement one round late; its eq. 4
    and Algorithm 3, which we follow, do neither. Per round and client 1 P down and 1 P up; state: w. Two backward
    passes a step.

    Args:
        rho: radius of the perturbation, a number or a schedule (see `fastsam.fed.algorithms.schedule`). The paper's
            theorems need c/sqrt(rounds).
        adaptive: ASAM, `eps = rho * T^2*g1/||T*g1||` with `T = |w| + eta`, element by element.
        eta: eta of ASAM.
    """

    rho: Scheduled = hparam(0.05, check_scheduled)
    adaptive: bool = hparam(False, choice, (True, False))
    eta: float = hparam(0.0, number, at_least=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.eta and not self.adaptive:
            raise ValueError(f"eta belongs to adaptive=True (ASAM), got eta={self.eta!r} with adaptive=False")

    def local_step(self, server: State, client: State, round: Round) -> Step:
        return SAM(rho=value_at("rho", self.rho, round), eta=self.eta, adaptive=self.adaptive)


@dataclass(frozen=True)
class MoFedSAM(ServerDirection):
    """FedSAM whose local steps follow the last round's global direction D as well.

        v = beta*g2 + (1 - beta)*D^t,  g2 as in FedSAM;  w <- w - lr * (v + weight_decay*w)
        D^{t+1} = -mean_i (w_i - w^t)/(lr_t*K_i),  D^0 = 0;  the server's step is FedAvg's

    In round 0 a step is beta times FedSAM's. The paper writes the server's step as `w - server_lr*D`, which is the
    plain mean only if `lr*K = 1`. We use the plain mean, as the authors' and the simulators' code does. Per round and
    client 2 P down (w, D) and 1 P up; state: w, D. Two backward passes a step.

    Args:
        rho: radius of the perturbation, a number or a schedule.
        beta: weight of the client's gradient; 1 is FedSAM.
        momentum_K: K_i counts a client's true local "steps", or its local "epochs". With the paper's 10 epochs and
            lr 0.1 the latter makes its literal formula the plain mean, and D several times larger.
    """

    rho: Scheduled = hparam(0.05, check_scheduled)
    beta: float = hparam(0.1, number, at_least=0, at_most=1)
    momentum_K: str = hparam("steps", choice, COUNTS)

    def local_step(self, server: State, client: State, round: Round) -> Step:
        rho = value_at("rho", self.rho, round)
        return SAM(rho=rho, a=self.beta, q=(1 - self.beta) * server["D"])
