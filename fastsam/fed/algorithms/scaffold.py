"""SCAFFOLD: Karimireddy, Kale, Mohri, Reddi, Stich and Suresh, "SCAFFOLD: Stochastic Controlled Averaging for Federated
Learning", ICML 2020 (Algorithm 1, option II)."""

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
)


@dataclass(frozen=True)
class SCAFFOLD(Algorithm):
    """Local SGD with control variates against the drift of the clients.

        w <- w - lr * (g + c - c_i + weight_decay*w)
        c_i <- c_i - c - (w_i - w^t)/(lr_t*K_i)          K_i the true number of local steps, c as received
        c <- c + 1/N * sum_i (change of c_i);  the server's step on w is FedAvg's

    c = c_i = 0 at the start, so round 0 is FedAvg. N are all clients, not the active ones: c is always the mean of all
    c_i. Per round and client 2 P down and 2 P up; state: w, c, and c_i on every client. One backward pass a step.
    """

    download_vectors: ClassVar[float] = 2
    upload_vectors: ClassVar[float] = 2
    uses_sums: ClassVar[bool] = True

    def uses_lr(self) -> bool:
        return True

    def init_server(self, w0: Tensor) -> State:
        return {**super().init_server(w0), "c": torch.zeros_like(w0)}

    def init_client(self, server: State) -> State:
        return {**super().init_client(server), "c_i": torch.zeros_like(server["c"])}

    def correction(self, server: State, client: State) -> Tensor:
        """Return `c - c_i`, to be added to the gradient."""
        return server["c"] - client["c_i"]

    def local_step(self, server: State, client: State, round: Round) -> Step:
        return Step(q=self.correction(server, client))

    def finish(self, server: State, client: State, results: ClientResults, round: Round) -> tuple[State, Upload]:
        state, upload = super().finish(server, client, results, round)
        change = results.delta / results.column(-round.lr * K for K in results.num_steps) - server["c"]
        return {**state, "c_i": client["c_i"] + change}, Upload(upload.mean, {**upload.sum, "dc": change})

    def step_server(self, server: State, aggregate: Aggregate, round: Round) -> State:
        # Divided by all N clients, not by the active ones: c stays the mean of all c_i.
        new_state = super().step_server(server, aggregate, round)
        return {**new_state, "c": apply_update(server["c"], aggregate.sum("dc") / round.num_clients)}
