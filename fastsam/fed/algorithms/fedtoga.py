"""FedTOGA: Li et al., arXiv 2408.14144, 2024."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fastsam.fed.algorithms.base import Aggregate, Direction, LocalUpdate, Round, State, hparam
from fastsam.fed.algorithms.feddyn import DynamicRegularizer, attraction
from fastsam.fed.algorithms.schedule import Scheduled, check_scheduled, value_at
from fastsam.fed.common.checks import number


@dataclass(frozen=True)
class FedTOGA(DynamicRegularizer):
    """FedDyn with SAM gradients whose perturbations, and dynamic regularisers, lean towards the last global update.

        d   = g1 + kappa*D + last,   eps = rho * d/||d||,    last the g2 of the step before, 0 in a round's first step
        w <- w - lr * (g2 + phi*(h_i + w - w^t) + beta*D + weight_decay*w),   g2 at w + eps
        D <- -mean_i (w_i - w^t);    h_i, H and w^{t+1} as in FedDyn

    D is signed like a gradient. kappa = beta = 0 is FedDyn with SAM gradients but for `last`. The server has no
    learning rate: a run's server_lr must be 1. Per round and client 2 P down (w, D) and 1 P up; state: w, H, D, and h_i
    on every client. Two backward passes a step.

    Args:
        rho: radius of the perturbation, a number or a schedule.
        kappa: weight of D in the direction, as the paper has it; the code seen has kappa*(h_i - w^t) there.
        phi: weight of the proximal term, `lamb` of the code.
        beta: weight of the correction, `lamb1` of the code.
        phi_decay: factor on phi after each round.
    """

    download_vectors: ClassVar[float] = 2
    server_vectors: ClassVar[float] = 3
    working_vectors: ClassVar[float] = 5
    backward_passes: ClassVar[int] = 2

    rho: Scheduled = hparam(0.1, check_scheduled)
    kappa: float = hparam(1.0, number, at_least=0)
    phi: float = hparam(0.1, number, at_least=0)
    beta: float = hparam(0.9, number, at_least=0)
    phi_decay: float = hparam(1.0, number, greater_than=0)

    def init_server(self, w0: Tensor) -> State:
        return {**super().init_server(w0), "D": torch.zeros_like(w0)}

    def local_update(self, server: State, client: State, round: Round) -> LocalUpdate:
        phi, rho, D = self.phi_of(round), value_at("rho", self.rho, round), server["D"]
        q = attraction(phi, server, client) + self.beta * D
        return LocalUpdate(
            Direction.GRADIENT_PLUS,
            rho=rho,
            direction_vector=self.kappa * D,
            uses_last_gradient=True,
            gradient_offset=q,
            proximal_coefficient=phi,
        )

    def step_server(self, server: State, aggregate: Aggregate, round: Round) -> State:
        return {**super().step_server(server, aggregate, round), "D": (-aggregate.mean("delta")).to(server["D"].dtype)}
