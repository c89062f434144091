"""FedNTD: Lee, Jeong, Shin, Bae and Yun, "Preservation of the Global Knowledge by Not-True Distillation in Federated
Learning", NeurIPS 2022 (eq. 4 and 5)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from fastsam.fed.algorithms.base import Algorithm, LocalUpdate, Round, State
from fastsam.fed.common.checks import number
from fastsam.fed.step.teacher import Teacher, divergence


@dataclass(frozen=True)
class FedNTD(Algorithm):
    """FedAvg whose clients keep what the received model says of the classes that a sample does not have.

        f_i = loss(w) + beta * tau^2 * KL(softmax'(out_{w^t}/tau) || softmax'(out_w/tau))

    softmax' is taken over all classes but the sample's own. Needs labels that number the model's outputs. The server's
    step is FedAvg's. Per round and client 1 P down and 1 P up; state: w. One back-propagation and a further forward
    pass a step.
    """

    working_vectors: ClassVar[float] = 1

    beta: float = 1.0
    tau: float = 1.0

    def __post_init__(self) -> None:
        number("beta", self.beta, at_least=0)
        number("tau", self.tau, above=0)

    def local_update(self, server: State, client: State, round: Round) -> LocalUpdate:
        return LocalUpdate(teacher=Teacher(server["w"], partial(_term, self.tau), self.beta))


def _term(tau: float, outputs: Tensor, told: Tensor, y: Tensor) -> Tensor:
    if y.is_floating_point() or y.dim() != outputs.dim() - 1:
        raise ValueError("FedNTD needs labels that number the model's outputs")
    classes = torch.arange(outputs.shape[1], device=y.device).view(-1, *[1] * (y.dim() - 1))
    return divergence(outputs, told, tau, left_out=classes == y.unsqueeze(1))
