"""FedCM: Xu, Wang, Wang and Yao, "FedCM: Federated Learning with Client-level Momentum", arXiv 2106.10874, 2021
(Algorithm 2)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fastsam.fed.algorithms.base import Aggregate, Algorithm, ClientResults, Round, State, Step, Upload, hparam
from fastsam.fed.common.checks import choice, number

COUNTS = ("steps", "epochs")  # values of momentum_K


class ServerDirection(Algorithm):
    """The server keeps `D^{t+1} = -mean_i (w_i - w^t)/(lr_t*K_i)`, D^0 = 0: the last round's mean gradient.

    Per round and client 2 P down (w, D) and 1 P up: the server makes both means of the one vector.

    Args:
        momentum_K: K_i counts a client's true local "steps", or its local "epochs" (D is then several times
            larger).
    """

    download_vectors: ClassVar[float] = 2

    momentum_K: str

    def uses_lr(self) -> bool:
        return True

    def init_server(self, w0: Tensor) -> State:
        return {"w": w0, "D": torch.zeros_like(w0)}

    def finish(self, server: State, client: State, results: ClientResults, round: Round) -> tuple[State, Upload]:
        counts = results.num_steps if self.momentum_K == "steps" else [round.local_epochs] * len(results.client_ids)
        D = results.delta / results.column(-round.lr * K for K in counts)
        return client, Upload(mean={"delta": results.delta, "D": D})

    def step_server(self, server: State, aggregate: Aggregate, round: Round) -> State:
        return {**super().step_server(server, aggregate, round), "D": aggregate.mean("D").to(server["D"].dtype)}


@dataclass(frozen=True)
class FedCM(ServerDirection):
    """Local steps that follow the last round's global direction D as well.

        w <- w - lr * (alpha*g + (1 - alpha)*D^t + weight_decay*w)
        D^{t+1} = -mean_i (w_i - w^t)/(lr_t*K_i),  D^0 = 0;  the server's step is FedAvg's

    In round 0 a step is alpha times FedAvg's. The paper writes the server's step as `w - server_lr*D`, which is the
    plain mean only if `lr*K = 1`. We use the plain mean, as the simulators do. Per round and client 2 P down (w, D) and
    1 P up; state: w, D. One backward pass a step.

    Args:
        alpha: weight of the client's gradient; 1 is FedAvg.
        momentum_K: K_i counts local "steps" or local "epochs".
    """

    alpha: float = hparam(0.1, number, at_least=0, at_most=1)
    momentum_K: str = hparam("steps", choice, COUNTS)

    def local_step(self, server: State, client: State, round: Round) -> Step:
        return Step(a=self.alpha, q=(1 - self.alpha) * server["D"])
