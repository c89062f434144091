"""Adaptive servers, shared by FedAdagrad, FedAdam and FedYogi: Reddi, Charles, Zaheer, Garrett, Rush, Konečný, Kumar
and McMahan, "Adaptive Federated Optimization", ICLR 2021 (Algorithm 2)."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from fastsam.fed.algorithms.base import Aggregate, Algorithm, Round, State, apply_update
from fastsam.fed.common.checks import number


class AdaptiveServer(Algorithm):
    """FedAvg on the clients, and an adaptive step with the mean delta on the server. The three methods differ only in
    V.

        m <- beta1*m + (1 - beta1)*mean_i (w_i - w^t),    V <- second_moment(V, (mean_i (w_i - w^t))^2)
        w^{t+1} = w^t + server_lr * m/(sqrt(V) + tau)

    The run's server_lr is the paper's eta; its experiments use 0.1 or less, and the run's default is 1. V0: every
    element of the first V; the paper also allows tau^2.
    Per round and client 1 P down and 1 P up; state: w, m, V. One backward pass a step.
    """

    server_vectors: ClassVar[float] = 3

    beta1: float
    tau: float
    V0: float

    def check_adaptive(self) -> None:
        """Raises ValueError for options outside their range."""
        number("beta1", self.beta1, at_least=0, at_most=1)
        number("tau", self.tau, above=0)
        number("V0", self.V0, at_least=0)

    def init_server(self, w0: Tensor) -> State:
        return {"w": w0, "m": torch.zeros_like(w0), "V": torch.full_like(w0, self.V0)}

    def second_moment(self, V: Tensor, square: Tensor) -> Tensor:
        """Return the new V from the old V and the square of the mean delta, float64 `[row_size]`."""
        raise NotImplementedError

    def corrected(self, m: Tensor, V: Tensor, round: Round) -> tuple[Tensor, Tensor]:
        """Return the m and V from which the step is computed."""
        return m, V

    def step_server(self, server: State, aggregate: Aggregate, round: Round) -> State:
        delta = aggregate.mean("delta")
        m = self.beta1 * server["m"].double() + (1 - self.beta1) * delta
        V = self.second_moment(server["V"].double(), delta**2)
        by, size = self.corrected(m, V, round)
        w = apply_update(server["w"], round.server_lr * by / (size.sqrt() + self.tau))
        return {"w": w, "m": m.to(w.dtype), "V": V.to(w.dtype)}
