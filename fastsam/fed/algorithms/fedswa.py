"""FedSWA: Liu, Liu, Shang, Liu, Liu and Feng, "Improving Generalization in Federated Learning with Highly Heterogeneous
Data via Momentum-Based Stochastic Controlled Weight Averaging", ICML 2025 (arXiv 2507.20016);
https://github.com/junkangLiu0/FedSWA."""

from __future__ import annotations

from dataclasses import dataclass

from fastsam.fed.algorithms.base import Aggregate, Algorithm, LocalUpdate, Round, State, apply_update
from fastsam.fed.common.checks import number


@dataclass(frozen=True)
class FedSWA(Algorithm):
    """Stochastic weight averaging: a learning rate that falls within every round, and a server that goes beyond the
    clients' mean.

        lr_k = lr * (1 - (1 - rho)*k/K),   k = 0 .. K-1
        w <- w - lr_k * (g + weight_decay*w);      w^{t+1} = w^t + alpha * server_lr * mean_i (w_i - w^t)

    rho: the rate at the end of a round over that at its beginning; 0, the authors' code, lets it fall to nothing. rho =
    alpha = 1 is FedAvg. That code doubles the rate, and takes alpha = 1 unless told otherwise.
    Per round and client 1 P down and 1 P up; state: w. One backward pass a step.
    """

    rho: float = 0.1
    alpha: float = 1.5

    def __post_init__(self) -> None:
        number("rho", self.rho, at_least=0)
        number("alpha", self.alpha, above=0)

    def local_update(self, server: State, client: State, round: Round) -> LocalUpdate:
        return LocalUpdate(lr_end_factor=self.rho)

    def step_server(self, server: State, aggregate: Aggregate, round: Round) -> State:
        return {**server, "w": apply_update(server["w"], self.alpha * round.server_lr * aggregate.mean("delta"))}
