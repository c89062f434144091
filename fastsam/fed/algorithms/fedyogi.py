"""FedYogi: Reddi, Charles, Zaheer, Garrett, Rush, Konečný, Kumar and McMahan, "Adaptive Federated Optimization", ICLR
2021 (Algorithm 2)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fastsam.fed.algorithms.adaptive import AdaptiveServer
from fastsam.fed.common.checks import number


@dataclass(frozen=True)
class FedYogi(AdaptiveServer):
    """FedAvg on the clients, Yogi with the mean displacement on the server: V moves by a bounded part of its distance.

        m <- beta1*m + (1 - beta1)*D,    V <- V - (1 - beta2)*D^2*sign(V - D^2),    D = mean_i (w_i - w^t)
        w^{t+1} = w^t + server_lr * m/(sqrt(V) + tau)

    The run's server_lr is the paper's eta; its experiments use 0.1 or less, the run's own default is 1. V0: every
    element of the first V; the paper also allows tau^2.
    Per round and client 1 P down and 1 P up; state: w, m, V. One backward pass a step.
    """

    beta1: float = 0.9
    beta2: float = 0.99
    tau: float = 0.01
    V0: float = 0.0

    def __post_init__(self) -> None:
        self.check_adaptive()
        number("beta2", self.beta2, at_least=0, at_most=1)

    def second_moment(self, V: Tensor, square: Tensor) -> Tensor:
        return V - (1 - self.beta2) * square * (V - square).sign()
