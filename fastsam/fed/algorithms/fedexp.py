"""FedExP: Jhunjhunwala, Wang and Joshi, "FedExP: Speeding Up Federated Averaging via Extrapolation", ICLR 2023
(Algorithm 1)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fastsam.fed.algorithms.base import (
    Aggregate,
    Algorithm,
    ClientResults,
    Round,
    State,
    Step,
    Upload,
    apply_update,
    hparam,
)
from fastsam.fed.common.checks import choice, number


@dataclass(frozen=True)
class FedExP(Algorithm):
    """FedAvg whose server takes longer steps if clients disagree.

        eta = max(1, mean_i ||Delta_i||^2 / (2*(||mean_i Delta_i||^2 + eps)))
        x^{t+1} = x^t + eta * mean_i Delta_i,    Delta_i = x_i - x^t;    w^{t+1} = (x^{t+1} + x^t)/2

    Clients train from the iterate x. The authors' code multiplies eps by the number of active clients, and does not
    average after the first round. The server computes its step length, so a run's server_lr must be 1. Per round and
    client 1 P down and 1 P and a number up; state: w, x. One backward pass a step.

    Args:
        eps: added to the squared norm of the mean, in the paper's grid 1e-3 to 1e-1.
        average: the run's model is the mean of the last two iterates, because x oscillates about the minimum; False
            for w = x.
    """

    sends_norms: ClassVar[bool] = True

    eps: float = hparam(1e-3, number, greater_than=0)
    average: bool = hparam(True, choice, (True, False))

    def uses_server_lr(self) -> bool:
        return False

    def init_server(self, w0: Tensor) -> State:
        return {"w": w0, "x": w0}

    def local_step(self, server: State, client: State, round: Round) -> Step:
        return Step(start=server["x"])

    def finish(self, server: State, client: State, results: ClientResults, round: Round) -> tuple[State, Upload]:
        norm = torch.linalg.vector_norm(results.delta, dim=1, keepdim=True, dtype=torch.float64)
        return client, Upload(mean={"delta": results.delta, "square": norm**2})

    def step_server(self, server: State, aggregate: Aggregate, round: Round) -> State:
        delta = aggregate.mean("delta")
        eta = (aggregate.mean("square") / (2 * (delta.square().sum() + self.eps))).clamp(min=1)
        x = apply_update(server["x"], eta * delta)
        w = apply_update(server["x"], 0.5 * eta * delta) if self.average else x
        return {"w": w, "x": x}
