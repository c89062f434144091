"""Control variates, shared by SCAFFOLD, FedGAMMA and FedLESAM-S: Karimireddy, Kale, Mohri, Reddi, Stich and Suresh,
"SCAFFOLD: Stochastic Controlled Averaging for Federated Learning", ICML 2020 (Algorithm 1, option II)."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from fastsam.fed.algorithms.base import Aggregate, Algorithm, ClientResults, Round, State, Upload, apply_update


class ControlVariates(Algorithm):
    """The server keeps c, and a client c_i: running estimates of the global gradient and of the client's gradient.
    Steps add `c - c_i`.

    Per round and client 2 P down (w, c) and 2 P up (the displacement, the change of c_i).
    """

    download_vectors: ClassVar[float] = 2
    upload_vectors: ClassVar[float] = 2
    server_vectors: ClassVar[float] = 2
    client_vectors: ClassVar[float] = 1
    working_vectors: ClassVar[float] = 1
    uses_sums: ClassVar[bool] = True

    def init_server(self, w0: Tensor) -> State:
        return {**super().init_server(w0), "c": torch.zeros_like(w0)}

    def init_client(self, server: State) -> State:
        return {**super().init_client(server), "c_i": torch.zeros_like(server["c"])}

    def correction(self, server: State, client: State) -> Tensor:
        """`c - c_i`, to be added to the gradient."""
        return server["c"] - client["c_i"]

    def finish_client(self, server: State, client: State, results: ClientResults, round: Round) -> tuple[State, Upload]:
        state, upload = super().finish_client(server, client, results, round)
        change = results.delta / results.column(-round.lr * K for K in results.num_steps) - server["c"]
        return {**state, "c_i": client["c_i"] + change}, Upload(upload.mean, {**upload.sum, "dc": change})

    def step_server(self, server: State, aggregate: Aggregate, round: Round) -> State:
        # Divided by all N clients, not by the active ones: c stays the mean of all c_i.
        after = super().step_server(server, aggregate, round)
        return {**after, "c": apply_update(server["c"], aggregate.sum("dc") / round.num_clients)}
