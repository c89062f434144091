"""FedDyn: Acar, Zhao, Navarro, Mattina, Whatmough and Saligrama, "Federated Learning Based on Dynamic Regularization",
ICLR 2021 (Algorithm 1)."""

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
from fastsam.fed.common.checks import decay_rate, number


class DynamicRegularizer(Algorithm):
    """Common parts of FedDyn and its relatives. A client keeps h_i, the sum of its displacements, and the server H, the
    mean of all h_i. Steps add `phi*(h_i + w - w^t)`.

    In the paper's terms `lambda_i = -phi*h_i`. The server's step is `w^{t+1} = w^t + mean_i(w_i - w^t) + H` with the
    new H: it has no learning rate, so a run's server_lr must be 1. Per round and client 1 P down and 1 P up.

    Args:
        phi: weight of the proximal term.
        phi_decay: factor on phi after each round.
    """

    uses_sums: ClassVar[bool] = True

    phi: float
    phi_decay: float

    def init_server(self, w0: Tensor) -> State:
        return {**super().init_server(w0), "H": torch.zeros_like(w0)}

    def init_client(self, server: State) -> State:
        return {**super().init_client(server), "h_i": torch.zeros_like(server["w"])}

    def finish(self, server: State, client: State, results: ClientResults, round: Round) -> tuple[State, Upload]:
        state, upload = super().finish(server, client, results, round)
        new_state = {**state, "h_i": client["h_i"] + results.delta}
        return new_state, Upload(upload.mean, {**upload.sum, "dh": results.delta})

    def step_server(self, server: State, aggregate: Aggregate, round: Round) -> State:
        new_state = super().step_server(server, aggregate, round)
        # Divided by all N clients, not by the active ones: H stays the mean of all h_i.
        H = apply_update(server["H"], aggregate.sum("dh") / round.num_clients)
        return {**new_state, "H": H, "w": apply_update(server["w"], aggregate.mean("delta") + H.double())}

    def uses_server_lr(self) -> bool:
        return False

    def phi_of(self, round: Round) -> float:
        """Return the proximal coefficient of the round."""
        return decay_rate("phi", self.phi, "phi_decay", self.phi_decay, round.index)


def attraction(phi: float, server: State, client: State) -> Tensor:
    """Return `phi*(h_i - w^t)`, the constant half of `phi*(h_i + w - w^t)`."""
    return phi * (client["h_i"] - server["w"])


@dataclass(frozen=True)
class FedDyn(DynamicRegularizer):
    """Local SGD on a loss with a linear and a proximal term that move its minimum to the global one.

        w <- w - lr * (g + phi*(h_i + w - w^t) + weight_decay*w)        h_i = -lambda_i/phi of the paper
        h_i <- h_i + (w_i - w^t),    H <- H + 1/N * sum_i (w_i - w^t)
        w^{t+1} = w^t + mean_i (w_i - w^t) + H                          with the new H

    N counts all clients, so that H is always the mean of all h_i. The server has no learning rate: a run's server_lr
    must be 1. phi -> 0 is not FedAvg, because H stays. Per round and client 1 P down and 1 P up; state: w, H, and h_i
    on every client. One backward pass a step.

    Args:
        phi: weight of the proximal term, the paper's alpha.
        phi_decay: factor on phi after each round. (Fan et al. 2024 write that they decay phi; their code decays lr,
            as the run's lr_decay does.)
    """

    phi: float = hparam(0.1, number, at_least=0)
    phi_decay: float = hparam(1.0, number, greater_than=0)

    def local_step(self, server: State, client: State, round: Round) -> Step:
        phi = self.phi_of(round)
        return Step(q=attraction(phi, server, client), prox=phi)
