"""FedGloSS: Caldarola, Cagnasso, Caputo and Ciccone, "Beyond Local Sharpness: Communication-Efficient Global
Sharpness-aware Minimization for Federated Learning", CVPR 2025 (Algorithm 1)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fastsam.fed.algorithms.base import SAM, Aggregate, Round, State, Step, hparam
from fastsam.fed.algorithms.feddyn import DynamicRegularizer
from fastsam.fed.algorithms.schedule import Scheduled, check_scheduled, value_at
from fastsam.fed.common.checks import number
from fastsam.fed.update.steps import NU


@dataclass(frozen=True)
class FedGloSS(DynamicRegularizer):
    """SAM on the server, with FedDyn on the clients. Clients start at the global model, perturbed against the last
    round's mean delta.

        z^t = w^t - rho * D/||D||,  D = mean_i Delta_i of the last round; z^0 = w^0
        w <- w - lr * (g + phi*(h_i + w - z^t) + weight_decay*w),  from w = z^t;   g at w + rho_local*g1/||g1||
        Delta_i = w_i - z^t;   h_i <- h_i + Delta_i,   H <- H + 1/N * sum_i Delta_i
        w^{t+1} = w^t + mean_i Delta_i + H                                 with the new H

    -D is the pseudo-gradient that a server descends by. h_i = -beta*sigma_i, H = -beta*sigma. The server has no
    learning rate: a run's server_lr must be 1. The authors' code divides the change of sigma by the number of active
    clients once more, and its schedule of the server's rho is one increment above the clients' schedule. Per round and
    client 1 P down (z^t) and 1 P up; state: w, H, d = -D/||D||, and h_i on every client. Two backward passes a step.

    Args:
        rho: radius on the server, a number or a schedule. The authors raise both radii from 0.001 over the first
            rounds, `"linear(0.001, 0.15, 2000)"`.
        rho_local: radius on the clients, a number or a schedule. 0 is the paper's version with SGD on the clients,
            one backward pass a step.
        phi: weight of the proximal term, the paper's 1/beta.
        phi_decay: factor on phi after each round.
    """

    rho: Scheduled = hparam(0.15, check_scheduled)
    rho_local: Scheduled = hparam(0.15, check_scheduled)
    phi: float = hparam(0.1, number, at_least=0)
    phi_decay: float = hparam(1.0, number, greater_than=0)

    def init_server(self, w0: Tensor) -> State:
        return {**super().init_server(w0), "d": torch.zeros_like(w0)}

    def local_step(self, server: State, client: State, round: Round) -> Step:
        phi, rho_local = self.phi_of(round), value_at("rho_local", self.rho_local, round)
        start = server["w"] + value_at("rho", self.rho, round) * server["d"]
        q = phi * (client["h_i"] - start)
        if self.rho_local == 0:
            return Step(q=q, prox=phi, start=start)
        return SAM(rho=rho_local, q=q, prox=phi, start=start)

    def step_server(self, server: State, aggregate: Aggregate, round: Round) -> State:
        delta = aggregate.mean("delta")
        d = -delta / (torch.linalg.vector_norm(delta) + NU)
        return {**super().step_server(server, aggregate, round), "d": d.to(server["d"].dtype)}
