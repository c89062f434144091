"""pFedMe: Dinh, Tran and Nguyen, "Personalized Federated Learning with Moreau Envelopes", NeurIPS 2020 (Algorithm 1);
https://github.com/CharlieDinh/pFedMe."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fastsam.fed.algorithms.base import Algorithm, Client, ClientResults, Round, State, Step, Upload, hparam
from fastsam.fed.common.checks import integer, number


@dataclass(frozen=True)
class pFedMe(Algorithm):
    """Each client's personal model theta minimises its loss near a local model w_i. w_i follows theta and is averaged.

        on each batch:  theta <- theta - lr * (grad f_i(theta) + lam*(theta - w_i))     K times
                        w_i   <- w_i - eta*lam*(w_i - theta)
        w <- (1 - server_lr)*w + server_lr * mean_i w_i

    Both models begin a round at w^t, and theta continues from batch to batch. The run's lr is the paper's learning rate
    of theta, and server_lr is its beta. The run's momentum and weight decay apply to theta, which is evaluated as the
    client's model. Per round and client 1 P down and 1 P up; state: w, and theta on every client. One backward pass a
    step, K steps a batch.

    Args:
        lam: weight of the proximal term.
        K: steps of theta on a batch.
        eta: learning rate of w_i.

    Raises:
        ValueError: lr * lam is 2 or more in a round, so that the steps of the proximal term diverge.
    """

    own_models: ClassVar[bool] = True

    lam: float = hparam(15.0, number, greater_than=0)
    K: int = hparam(5, integer, at_least=1)
    eta: float = hparam(0.005, number, greater_than=0)

    def init_client(self, server: State) -> State:
        return {"theta": server["w"]}

    def local_step(self, server: State, client: State, round: Round) -> Step:
        if round.lr * self.lam >= 2:
            raise ValueError(
                "lr * lam must be below 2. Otherwise each step of theta about w_i is longer than the previous step; "
                f"got lr={round.lr:g} and lam={self.lam:g}. Use an lr below {2 / self.lam:.3g}, or a smaller lam"
            )
        return Step(prox=self.lam, q=-self.lam * server["w"])

    def train_client(self, client: Client, server: State, state: State, round: Round) -> Mapping[str, Tensor]:
        w_i, offset = client.start.clone(), client.gradient_offset
        for x, y in client.batches():
            for _ in range(self.K):
                client.step(x, y)
            w_i.lerp_(client.w, self.eta * self.lam)
            torch.mul(w_i, -self.lam, out=offset)
        delta_theta, client.w = client.delta, w_i
        return {"delta_theta": delta_theta}

    def finish(self, server: State, client: State, results: ClientResults, round: Round) -> tuple[State, Upload]:
        return {"theta": server["w"] + results.extra["delta_theta"]}, Upload(mean={"delta": results.delta})

    def own_model(self, server: State, client: State) -> Tensor:
        return client["theta"]
