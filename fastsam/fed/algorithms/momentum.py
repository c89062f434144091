"""The server's direction D, shared by FedCM and MoFedSAM: Xu, Wang, Wang and Yao, "FedCM: Federated Learning with
Client-level Momentum", arXiv 2106.10874, 2021 (Algorithm 2)."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from fastsam.fed.algorithms.base import Aggregate, Algorithm, ClientResults, Round, State, Upload

COUNTS = ("steps", "epochs")  # values of momentum_K


class ServerDirection(Algorithm):
    """The server keeps `D^{t+1} = -mean_i (w_i - w^t)/(lr_t*K_i)`, D^0 = 0: the last round's mean gradient.

    momentum_K: K_i counts a client's true local "steps", or its local "epochs" (D is then several times larger).
    Per round and client 2 P down (w, D) and 1 P up: the server makes both means of the one vector.
    """

    download_vectors: ClassVar[float] = 2
    server_vectors: ClassVar[float] = 2
    working_vectors: ClassVar[float] = 1

    momentum_K: str

    def init_server(self, w0: Tensor) -> State:
        return {"w": w0, "D": torch.zeros_like(w0)}

    def finish_client(self, server: State, client: State, results: ClientResults, round: Round) -> tuple[State, Upload]:
        counts = results.num_steps if self.momentum_K == "steps" else [round.local_epochs] * len(results.client_ids)
        D = results.delta / results.column(-round.lr * K for K in counts)
        return client, Upload(mean={"delta": results.delta, "D": D})

    def step_server(self, server: State, aggregate: Aggregate, round: Round) -> State:
        return {**super().step_server(server, aggregate, round), "D": aggregate.mean("D").to(server["D"].dtype)}
