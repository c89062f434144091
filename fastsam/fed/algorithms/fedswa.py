"""FedSWA and FedMoSWA: Liu, Liu, Shang, Liu, Liu and Feng, "Improving Generalization in Federated Learning with Highly
Heterogeneous Data via Momentum-Based Stochastic Controlled Weight Averaging", ICML 2025 (arXiv 2507.20016);
https://github.com/junkangLiu0/FedSWA."""

from __future__ import annotations

from dataclasses import dataclass

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
from fastsam.fed.algorithms.scaffold import SCAFFOLD
from fastsam.fed.common.checks import number


@dataclass(frozen=True, eq=False)
class Falling(Step):
    """A step whose learning rate falls within a round, from the round's to `end` times it."""

    end: float = 1.0

    def rate(self, k: int, steps: int) -> float:
        return 1 - (1 - self.end) * k / steps


def lr_sum(end: float, steps: int) -> float:
    """Return the sum of the learning rates of `steps` steps of `Falling`, in units of the round's learning rate."""
    return steps - (1 - end) * (steps - 1) / 2


@dataclass(frozen=True)
class FedSWA(Algorithm):
    """Stochastic weight averaging: a learning rate that falls within every round, and a server that goes beyond the
    clients' mean.

        lr_k = lr * (1 - (1 - rho)*k/K),   k = 0 .. K-1
        w <- w - lr_k * (g + weight_decay*w);      w^{t+1} = w^t + alpha * server_lr * mean_i (w_i - w^t)

    rho = alpha = 1 is FedAvg. The authors' code doubles the rate, and its default is alpha = 1. Per round and client 1
    P down and 1 P up; state: w. One backward pass a step.

    Args:
        rho: rate at the end of a round over the rate at its beginning; 0 in the authors' code.
        alpha: factor on the mean delta.
    """

    rho: float = hparam(0.1, number, at_least=0)
    alpha: float = hparam(1.5, number, greater_than=0)

    def local_step(self, server: State, client: State, round: Round) -> Step:
        return Falling(end=self.rho)

    def step_server(self, server: State, aggregate: Aggregate, round: Round) -> State:
        return {**server, "w": apply_update(server["w"], self.alpha * round.server_lr * aggregate.mean("delta"))}


@dataclass(frozen=True)
class FedMoSWA(SCAFFOLD):
    """FedSWA with control variates. The server's variate is a moving average of the active clients' variates.

        lr_k = lr * (1 - (1 - rho)*k/K),   k = 0 .. K-1
        w <- w - lr_k * (g + c - c_i + weight_decay*w)
        c_i <- c_i - c - (w_i - w^t)/sum_k lr_k;   c <- c + gamma * mean_i (c_i - c)      over the active clients
        w^{t+1} = w^t + alpha * server_lr * mean_i (w_i - w^t)

    rho and alpha are as in `FedSWA`, and the mean has the new c_i. gamma = 0.4 is from the authors' code. It divides
    by K times the mean of the first and the last rate in place of the sum of rates, and each client begins with the
    last rate of the previous client. The mean of the c_i has equal weights for all weightings of the run. Per round
    and client 2 P down and 2 P up; state: w, c, and c_i on every client. One backward pass a step.
    """

    rho: float = hparam(0.1, number, at_least=0)
    alpha: float = hparam(1.5, number, greater_than=0)
    gamma: float = hparam(0.4, number, at_least=0, at_most=1)

    def local_step(self, server: State, client: State, round: Round) -> Step:
        return Falling(q=self.correction(server, client), end=self.rho)

    def finish(self, server: State, client: State, results: ClientResults, round: Round) -> tuple[State, Upload]:
        rates = results.column(-round.lr * lr_sum(self.rho, K) for K in results.num_steps)
        c_i = client["c_i"] - server["c"] + results.delta / rates
        return {"c_i": c_i}, Upload({"delta": results.delta}, {"dc": c_i - server["c"]})

    def step_server(self, server: State, aggregate: Aggregate, round: Round) -> State:
        w = apply_update(server["w"], self.alpha * round.server_lr * aggregate.mean("delta"))
        return {"w": w, "c": apply_update(server["c"], self.gamma * aggregate.sum("dc") / aggregate.num_clients)}
