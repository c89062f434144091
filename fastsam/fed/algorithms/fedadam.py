"""FedAdam: Reddi, Charles, Zaheer, Garrett, Rush, Konečný, Kumar and McMahan, "Adaptive Federated Optimization", ICLR
2021 (Algorithm 2)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fastsam.fed.algorithms.adaptive import AdaptiveServer
from fastsam.fed.algorithms.base import Round
from fastsam.fed.common.checks import choice, number


@dataclass(frozen=True)
class FedAdam(AdaptiveServer):
    """FedAvg on the clients, Adam with the mean displacement on the server.

        m <- beta1*m + (1 - beta1)*mean_i (w_i - w^t),    V <- beta2*V + (1 - beta2)*(mean_i (w_i - w^t))^2
        w^{t+1} = w^t + server_lr * m/(sqrt(V) + tau)

    The run's server_lr is the paper's eta; its experiments use 0.1 or less, the run's own default is 1.
    bias_correction: m and V divided by `1 - beta^{t+1}`, as Adam has it and the paper has not. V0: every element of the
    first V; the paper also allows tau^2. With 0 the first step is about `server_lr*(1 - beta1)/sqrt(1 - beta2)` in
    every element that moves. Per round and client 1 P down and 1 P up; state: w, m, V. One backward pass a step.
    """

    beta1: float = 0.9
    beta2: float = 0.99
    tau: float = 0.01
    bias_correction: bool = False
    V0: float = 0.0

    def __post_init__(self) -> None:
        self.check_adaptive()
        number("beta2", self.beta2, at_least=0, at_most=1)
        choice("bias_correction", self.bias_correction, (True, False))
        if self.bias_correction and (self.V0 or self.beta1 == 1 or self.beta2 == 1):
            raise ValueError(
                "bias_correction undoes the start at zero: it needs V0 = 0 and beta1, beta2 < 1, "
                f"got V0={self.V0!r}, beta1={self.beta1!r}, beta2={self.beta2!r}"
            )

    def second_moment(self, V: Tensor, square: Tensor) -> Tensor:
        return self.beta2 * V + (1 - self.beta2) * square

    def corrected(self, m: Tensor, V: Tensor, round: Round) -> tuple[Tensor, Tensor]:
        grown = (1 - self.beta1 ** (round.index + 1), 1 - self.beta2 ** (round.index + 1))
        return (m / grown[0], V / grown[1]) if self.bias_correction else (m, V)
