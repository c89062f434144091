"""MimeLite: Karimireddy, Jaggi, Kale, Mohri, Reddi, Stich and Suresh, "Breaking the Centralized Barrier for
Cross-Device Federated Learning", NeurIPS 2021 (Algorithm 1, MimeLite, with SGD with momentum as the base optimizer)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fastsam.fed.algorithms.base import Aggregate, Algorithm, ClientResults, LocalUpdate, Round, State, Upload, hparam
from fastsam.fed.common.checks import choice, number

FORMS = ("convex", "heavy_ball")


@dataclass(frozen=True)
class MimeLite(Algorithm):
    """Local steps with the server's momentum m, which is frozen in a round and made of full gradients at w^t.

        w <- w - lr * (beta*g + (1 - beta)*m^t + weight_decay*w)
        m^{t+1} = beta * mean_i G_i + (1 - beta)*m^t,  G_i the gradient over all of client i's samples at w^t,  m^0 = 0

    The server's step is FedAvg's. G_i is taken in evaluation mode, without augmentation and weight decay. The
    run's `privacy.clip` bounds the displacement and G_i, each by itself. Per round and client 2 P down (w, m) and 2 P
    up (displacement, G_i); state: w, m. One backward pass a step, and one more pass over the data per round.

    Args:
        beta: weight of a new gradient; 1 is FedAvg.
        momentum_form: "convex" as above (Qu et al. 2022 tune one beta for FedCM, MimeLite and MoFedSAM), or
            "heavy_ball", `g + (1 - beta)*m` and `G + (1 - beta)*m`, as in the authors' code: the same directions,
            1/beta times as long.
    """

    download_vectors: ClassVar[float] = 2
    upload_vectors: ClassVar[float] = 2
    server_vectors: ClassVar[float] = 2
    working_vectors: ClassVar[float] = 1

    beta: float = hparam(0.1, number, at_least=0, at_most=1)
    momentum_form: str = hparam("convex", choice, FORMS)

    @property
    def _fresh(self) -> float:
        """The weight of a new gradient."""
        return self.beta if self.momentum_form == "convex" else 1.0

    def init_server(self, w0: Tensor) -> State:
        return {"w": w0, "m": torch.zeros_like(w0)}

    def local_update(self, server: State, client: State, round: Round) -> LocalUpdate:
        return LocalUpdate(
            perturbed_weight=self._fresh, gradient_offset=(1 - self.beta) * server["m"], full_gradient=True
        )

    def finish_client(self, server: State, client: State, results: ClientResults, round: Round) -> tuple[State, Upload]:
        if results.gradient is None:
            raise ValueError("MimeLite needs the full gradient of every client; this executor returned none")
        return client, Upload(mean={"delta": results.delta, "G": results.gradient})

    def step_server(self, server: State, aggregate: Aggregate, round: Round) -> State:
        m = self._fresh * aggregate.mean("G") + (1 - self.beta) * server["m"].double()
        return {**super().step_server(server, aggregate, round), "m": m.to(server["m"].dtype)}
