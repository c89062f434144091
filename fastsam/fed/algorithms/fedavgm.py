"""FedAvgM: Hsu, Qi and Brown, "Measuring the Effects of Non-Identical Data Distribution for Federated Visual
Classification", arXiv 1909.06335, 2019 (section 4.2)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fastsam.fed.algorithms.base import Aggregate, Algorithm, Round, State, apply_update, hparam
from fastsam.fed.common.checks import number


@dataclass(frozen=True)
class FedAvgM(Algorithm):
    """FedAvg with a momentum on the server.

        m <- beta*m + mean_i (w_i - w^t),    w^{t+1} = w^t + server_lr * m

    beta = 0 is FedAvg. Of a displacement that stays the same, 1/(1 - beta) times as much is taken in the end: with beta
    = 0.9 a run's server_lr of 0.1 goes as far as FedAvg.
    Per round and client 1 P down and 1 P up; state: w, m. One backward pass a step.
    """

    beta: float = hparam(0.9, number, at_least=0, at_most=1)

    def init_server(self, w0: Tensor) -> State:
        return {"w": w0, "m": torch.zeros_like(w0)}

    def step_server(self, server: State, aggregate: Aggregate, round: Round) -> State:
        m = self.beta * server["m"].double() + aggregate.mean("delta")
        return {"w": apply_update(server["w"], round.server_lr * m), "m": m.to(server["m"].dtype)}
