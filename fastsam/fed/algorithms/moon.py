"""MOON: Li, He and Song, "Model-Contrastive Federated Learning", CVPR 2021 (eq. 3, Algorithm 1);
https://github.com/QinbinLi/MOON."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor

from fastsam.fed.algorithms.base import Algorithm, ClientResults, LocalUpdate, Round, State, Upload
from fastsam.fed.algorithms.layers import last_layer
from fastsam.fed.common.checks import number
from fastsam.fed.step.teacher import Teacher


@dataclass(frozen=True)
class MOON(Algorithm):
    """FedAvg whose clients' representations z come closer to the received model's and go away from their own last
    model's.

        f_i = loss(w) - mu * mean log( exp(s/tau) / (exp(s/tau) + exp(s_old/tau)) ),    s = cos(z_w, z_{w^t}),  s_old =
        cos(z_w, z_{w_i})

    w_i is what client i's local steps last ended with; in its first round the received model, for which the term has no
    gradient.
    features: the module that returns z, by name (the paper's projection head); None: what the last layer receives. The
    server's step is FedAvg's. Per round and client 1 P down and 1 P up; state: w, and w_i on every client. One
    back-propagation and two further forward passes a step.
    """

    client_vectors: ClassVar[float] = 1
    working_vectors: ClassVar[float] = 2

    mu: float = 1.0
    tau: float = 0.5
    features: str | None = None

    def __post_init__(self) -> None:
        number("mu", self.mu, at_least=0)
        number("tau", self.tau, above=0)
        if self.features is not None and (not isinstance(self.features, str) or not self.features):
            raise ValueError(
                f"features must be the name of a module, or None for the input of the last layer, got {self.features!r}"
            )

    def init_client(self, server: State) -> State:
        return {"w_i": server["w"]}

    def local_update(self, server: State, client: State, round: Round) -> LocalUpdate:
        last = last_layer(round.layout.template) or None
        teacher = Teacher(
            (server["w"], client["w_i"]),
            partial(_term, self.tau),
            self.mu,
            self.features or last,
            received=self.features is None,
        )
        return LocalUpdate(teacher=teacher)

    def finish_client(self, server: State, client: State, results: ClientResults, round: Round) -> tuple[State, Upload]:
        return {"w_i": server["w"] + results.delta}, Upload(mean={"delta": results.delta})


def _term(tau: float, z: Tensor, told: tuple[Tensor, Tensor], y: Tensor) -> Tensor:
    received, old = (F.cosine_similarity(z.flatten(1), other.flatten(1)) for other in told)
    return F.softplus((old - received) / tau).mean()
