"""FedAdagrad: Reddi, Charles, Zaheer, Garrett, Rush, Konečný, Kumar and McMahan, "Adaptive Federated Optimization",
ICLR 2021 (Algorithm 2)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fastsam.fed.algorithms.adaptive import AdaptiveServer


@dataclass(frozen=True)
class FedAdagrad(AdaptiveServer):
    """FedAvg on the clients, Adagrad with the mean displacement on the server.

        m <- beta1*m + (1 - beta1)*mean_i (w_i - w^t),    V <- V + (mean_i (w_i - w^t))^2
        w^{t+1} = w^t + server_lr * m/(sqrt(V) + tau)

    beta1 = 0, as in the paper's experiments, is Adagrad without momentum: m is the mean displacement itself. The run's
    server_lr is the paper's eta; its experiments use 0.1 or less, the run's own default is 1. V0: every element of the
    first V; the paper also allows tau^2. Per round and client 1 P down and 1 P up; state: w, m, V. One back-propagation
    a step.
    """

    beta1: float = 0.0
    tau: float = 0.01
    V0: float = 0.0

    def __post_init__(self) -> None:
        self.check_adaptive()

    def second_moment(self, V: Tensor, square: Tensor) -> Tensor:
        return V + square
