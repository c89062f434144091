"""FedSAM: Qu, Li, Duan, Liu, Tang and Lu, "Generalized Federated Learning via Sharpness Aware Minimization", ICML 2022
(eq. 4 and Algorithm 1). ASAM: Kwon, Kim, Park and Choi, "ASAM: Adaptive Sharpness-Aware Minimization", ICML 2021 (eq.
9)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fastsam.fed.algorithms.base import Algorithm, Direction, LocalUpdate, Round, State
from fastsam.fed.algorithms.schedule import Scheduled, check_scheduled, value_at
from fastsam.fed.common.checks import choice, number


@dataclass(frozen=True)
class FedSAM(Algorithm):
    """Local SAM steps, the server as in FedAvg.

        eps = rho * g1/||g1||,  g1 the batch gradient at w, the norm over the whole model
        w <- w - lr * (g2 + weight_decay*w),  g2 the gradient of the same batch at w + eps

    rho: a number, or a schedule (see `fastsam.fed.algorithms.schedule`); the paper's theorems want c/sqrt(rounds).
    adaptive: ASAM, `eps = rho * T^2*g1/||T*g1||` with `T = |w| + eta`, element by element.
    The paper's eq. 3 multiplies by a further sign(g1) and its server uses the displacement one round late; its eq. 4
    and Algorithm 3, which we follow, do neither. Per round and client 1 P down and 1 P up; state: w. Two backward
    passes a step.
    """

    working_vectors: ClassVar[float] = 1
    backward_passes: ClassVar[int] = 2

    rho: Scheduled = 0.05
    adaptive: bool = False
    eta: float = 0.0

    def __post_init__(self) -> None:
        check_scheduled("rho", self.rho)
        number("eta", self.eta, at_least=0)
        choice("adaptive", self.adaptive, (True, False))
        if self.eta and not self.adaptive:
            raise ValueError(f"eta belongs to adaptive=True (ASAM), got eta={self.eta!r} with adaptive=False")

    def local_update(self, server: State, client: State, round: Round) -> LocalUpdate:
        direction = Direction.ADAPTIVE_GRADIENT if self.adaptive else Direction.GRADIENT
        return LocalUpdate(direction, rho=value_at("rho", self.rho, round), eta=self.eta)
