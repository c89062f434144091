"""FedNSAM: Liu, Shang, Tian, Liu and Liu, "Consistency of Local and Global Flatness for Federated Learning", 2026
(arXiv 2602.23827); https://github.com/junkangLiu0/FedNSAM."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fastsam.fed.algorithms.base import (
    SAM,
    Aggregate,
    Algorithm,
    Round,
    Shifted,
    State,
    Step,
    apply_update,
    hparam,
)
from fastsam.fed.algorithms.schedule import Scheduled, check_scheduled, value_at
from fastsam.fed.common.checks import choice, number


@dataclass(frozen=True)
class FedNSAM(Algorithm):
    """SAM from the point at which Nesterov's momentum of the server looks ahead.

        clients start at z^t = w^t + gamma*m^t
        w <- w - lr * (g2 + weight_decay*w),   g2 at w + rho*g1/||g1||;      Delta_i = w_i - z^t
        m^{t+1} = gamma*m^t + mean_i Delta_i,   w^{t+1} = w^t + server_lr * m^{t+1},   m^0 = 0

    so that, with server_lr = 1, w^{t+1} is the mean of the clients' models. The authors' code has the momentum (1 +
    gamma) times the last mean delta, without earlier ones. Per round and client 1 P down (z^t; with "momentum" m^t too)
    and 1 P up; state: w, m. Two backward passes a step.

    Args:
        rho: radius of the perturbation, a number or a schedule. The default is from the authors' code.
        gamma: factor of the server's momentum. The default is from the authors' code.
        perturb: direction of the perturbation: "gradient", the local gradient, as in the authors' code, or
            "momentum", along -m^t, as in their abstract. The latter is known before the gradient: one backward pass
            a step, and no perturbation in round 0.
    """

    rho: Scheduled = hparam(0.05, check_scheduled)
    gamma: float = hparam(0.85, number, at_least=0, at_most=1)
    perturb: str = hparam("gradient", choice, ("gradient", "momentum"))

    @property
    def download_vectors(self) -> float:  # type: ignore[override]
        """Vectors that a client receives in a round."""
        return 2 if self.perturb == "momentum" else 1

    def init_server(self, w0: Tensor) -> State:
        return {**super().init_server(w0), "m": torch.zeros_like(w0)}

    def local_step(self, server: State, client: State, round: Round) -> Step:
        start, rho = server["w"] + self.gamma * server["m"], value_at("rho", self.rho, round)
        if self.perturb == "momentum":
            return Shifted(rho=rho, e=-server["m"], start=start)
        return SAM(rho=rho, start=start)

    def step_server(self, server: State, aggregate: Aggregate, round: Round) -> State:
        m = self.gamma * server["m"].double() + aggregate.mean("delta")
        return {"w": apply_update(server["w"], round.server_lr * m), "m": m.to(server["m"].dtype)}
