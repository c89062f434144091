"""FedNova: Wang, Liu, Liang, Joshi and Poor, "Tackling the Objective Inconsistency Problem in Heterogeneous Federated
Optimization", NeurIPS 2020 (eq. 6, section 4)."""

from __future__ import annotations

from dataclasses import dataclass

from fastsam.fed.algorithms.base import Aggregate, Algorithm, ClientResults, Round, State, Upload, apply_update


@dataclass(frozen=True)
class FedNova(Algorithm):
    """FedAvg with deltas that are normalised by the clients' numbers of steps.

        d_i = (w_i - w^t)/|a_i|,    |a_i| = K_i
        w^{t+1} = w^t + server_lr * mean_i |a_i| * mean_i d_i

    |a_i| is the sum of the weights of client i's gradients in its delta. With local momentum beta it is `(K_i -
    beta*(1 - beta^K_i)/(1 - beta))/(1 - beta)`, and momentum, dampening and Nesterov's form of an optimizer of torch
    count in the same way. If all clients take the same number of steps, this is FedAvg. The paper weights clients by
    their samples, as the run's weighting="samples". The server has no momentum; the paper's server has one in its
    experiments with momentum. Per round and client 1 P down and 1 P up; state: w. One backward pass a step.
    """

    def uses_lr(self) -> bool:
        return True

    def finish(self, server: State, client: State, results: ClientResults, round: Round) -> tuple[State, Upload]:
        heavy_ball = round.momentum, round.dampening, round.nesterov
        a = results.column(weight_of_gradients(K, *heavy_ball) for K in results.num_steps)
        return client, Upload(mean={"delta": results.delta / a, "a": a})

    def step_server(self, server: State, aggregate: Aggregate, round: Round) -> State:
        return {"w": apply_update(server["w"], round.server_lr * aggregate.mean("a") * aggregate.mean("delta"))}


def weight_of_gradients(steps: int, momentum: float, dampening: float = 0.0, nesterov: bool = False) -> float:
    """Return |a|: the sum over local steps of the weights that their gradients have in the displacement, in units of
    the learning rate. Momentum is as in `torch.optim.SGD`, whose first gradient is not dampened."""
    if not momentum:
        return float(steps)
    step, total = 1.0, 0.0
    for k in range(steps):
        step = momentum * step + 1 - dampening if k else step
        total += 1 + momentum * step if nesterov else step
    return total
