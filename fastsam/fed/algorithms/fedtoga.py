"""FedTOGA: Li et al., arXiv 2408.14144, 2024."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fastsam.fed.algorithms.base import SAM, Aggregate, Round, State, Step, hparam
from fastsam.fed.algorithms.feddyn import DynamicRegularizer, attraction
from fastsam.fed.algorithms.schedule import Scheduled, check_scheduled, value_at
from fastsam.fed.common.checks import number
from fastsam.fed.update.gradients import Gradients
from fastsam.fed.update.passes import Passes
from fastsam.fed.update.rows import Rows


@dataclass(frozen=True, eq=False)
class Remembering(SAM):
    """A step of SAM along `d = g1 + e + last`, `last` the g2 of the step before, 0 in a round's first step."""

    e: Tensor | None = None

    def begin(self, rows: Rows, w: Tensor, lr: float, passes: Passes) -> None:
        super().begin(rows, w, lr, passes)
        rows["last"].zero_()
        rows["direction"].zero_()

    def __call__(self, rows: Rows, passes: Passes) -> Tensor:
        losses, g1 = passes()
        d = rows["direction"].copy_(rows["e"]).add_(rows["last"])
        parts = rows.views_like(g1, d)
        torch._foreach_add_(parts, g1.tensors)
        rows.perturb(Gradients(parts, g1.slots, g1.table))
        _, g2 = passes()
        torch._foreach_copy_(rows.views_like(g2, rows["last"]), g2.tensors)
        rows.update(g2)
        return losses


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

    rho: Scheduled = hparam(0.1, check_scheduled)
    kappa: float = hparam(1.0, number, at_least=0)
    phi: float = hparam(0.1, number, at_least=0)
    beta: float = hparam(0.9, number, at_least=0)
    phi_decay: float = hparam(1.0, number, greater_than=0)

    def init_server(self, w0: Tensor) -> State:
        return {**super().init_server(w0), "D": torch.zeros_like(w0)}

    def local_step(self, server: State, client: State, round: Round) -> Step:
        phi, rho, D = self.phi_of(round), value_at("rho", self.rho, round), server["D"]
        q = attraction(phi, server, client) + self.beta * D
        return Remembering(q=q, prox=phi, rho=rho, e=self.kappa * D)

    def step_server(self, server: State, aggregate: Aggregate, round: Round) -> State:
        return {**super().step_server(server, aggregate, round), "D": (-aggregate.mean("delta")).to(server["D"].dtype)}
