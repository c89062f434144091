"""FedAdagrad, FedAdam and FedYogi: Reddi, Charles, Zaheer, Garrett, Rush, Konečný, Kumar and McMahan, "Adaptive
Federated Optimization", ICLR 2021 (Algorithm 2)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fastsam.fed.algorithms.base import Aggregate, Algorithm, Round, State, apply_update, hparam
from fastsam.fed.common.checks import choice, number


class AdaptiveServer(Algorithm):
    """FedAvg on the clients, and an adaptive step with the mean delta D on the server. The three methods differ only
    in V.

        m <- beta1*m + (1 - beta1)*D,    V <- second_moment(V, D^2),    w^{t+1} = w^t + server_lr * m/(sqrt(V) + tau)
    """

    beta1: float
    tau: float
    V0: float

    def init_server(self, w0: Tensor) -> State:
        return {"w": w0, "m": torch.zeros_like(w0), "V": torch.full_like(w0, self.V0)}

    def second_moment(self, V: Tensor, square: Tensor) -> Tensor:
        """Return the new V from the old V and the square of the mean delta, float64 `[row_size]`."""
        raise NotImplementedError

    def correct_bias(self, m: Tensor, V: Tensor, round: Round) -> tuple[Tensor, Tensor]:
        """Return the m and V from which the step is computed."""
        return m, V

    def step_server(self, server: State, aggregate: Aggregate, round: Round) -> State:
        delta = aggregate.mean("delta")
        m = self.beta1 * server["m"].double() + (1 - self.beta1) * delta
        V = self.second_moment(server["V"].double(), delta**2)
        step, size = self.correct_bias(m, V, round)
        w = apply_update(server["w"], round.server_lr * step / (size.sqrt() + self.tau))
        return {"w": w, "m": m.to(w.dtype), "V": V.to(w.dtype)}


@dataclass(frozen=True)
class FedAdagrad(AdaptiveServer):
    """FedAvg on the clients, Adagrad with the mean delta D on the server.

        m <- beta1*m + (1 - beta1)*D,    V <- V + D^2,    D = mean_i (w_i - w^t)
        w^{t+1} = w^t + server_lr * m/(sqrt(V) + tau)

    The run's server_lr is the paper's eta. The paper's experiments use 0.1 or less, and the run's default is 1. Per
    round and client 1 P down and 1 P up; state: w, m, V. One backward pass a step.

    Args:
        beta1: factor of the momentum; 0, as in the paper's experiments, is Adagrad without momentum.
        tau: added to the root of V.
        V0: every element of the first V; the paper also allows tau^2.
    """

    beta1: float = hparam(0.0, number, at_least=0, at_most=1)
    tau: float = hparam(0.01, number, greater_than=0)
    V0: float = hparam(0.0, number, at_least=0)

    def second_moment(self, V: Tensor, square: Tensor) -> Tensor:
        return V + square


@dataclass(frozen=True)
class FedAdam(AdaptiveServer):
    """FedAdagrad with Adam on the server: `V <- beta2*V + (1 - beta2)*D^2`.

    Args:
        beta1: factor of m.
        beta2: factor of V.
        tau: added to the root of V.
        bias_correction: divide m and V by `1 - beta^{t+1}`, as Adam does and the paper does not. With V0 = 0 the
            first step is about `server_lr*(1 - beta1)/sqrt(1 - beta2)` in every element that moves.
        V0: every element of the first V.
    """

    beta1: float = hparam(0.9, number, at_least=0, at_most=1)
    beta2: float = hparam(0.99, number, at_least=0, at_most=1)
    tau: float = hparam(0.01, number, greater_than=0)
    bias_correction: bool = hparam(False, choice, (True, False))
    V0: float = hparam(0.0, number, at_least=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bias_correction and (self.V0 or self.beta1 == 1 or self.beta2 == 1):
            raise ValueError(
                f"bias_correction undoes the start at zero: it needs V0 = 0 and beta1, beta2 < 1, got V0={self.V0!r}, "
                f"beta1={self.beta1!r}, beta2={self.beta2!r}"
            )

    def second_moment(self, V: Tensor, square: Tensor) -> Tensor:
        return self.beta2 * V + (1 - self.beta2) * square

    def correct_bias(self, m: Tensor, V: Tensor, round: Round) -> tuple[Tensor, Tensor]:
        corrections = (1 - self.beta1 ** (round.index + 1), 1 - self.beta2 ** (round.index + 1))
        return (m / corrections[0], V / corrections[1]) if self.bias_correction else (m, V)


@dataclass(frozen=True)
class FedYogi(AdaptiveServer):
    """FedAdagrad with Yogi on the server: `V <- V - (1 - beta2)*D^2*sign(V - D^2)` moves by a bounded part of its
    distance."""

    beta1: float = hparam(0.9, number, at_least=0, at_most=1)
    beta2: float = hparam(0.99, number, at_least=0, at_most=1)
    tau: float = hparam(0.01, number, greater_than=0)
    V0: float = hparam(0.0, number, at_least=0)

    def second_moment(self, V: Tensor, square: Tensor) -> Tensor:
        return V - (1 - self.beta2) * square * (V - square).sign()
