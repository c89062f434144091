"""FedNTD: Lee, Jeong, Shin, Bae and Yun, "Preservation of the Global Knowledge by Not-True Distillation in Federated
Learning", NeurIPS 2022 (eq. 4 and 5)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fastsam.fed.algorithms.base import Algorithm, Round, State, Step, hparam
from fastsam.fed.algorithms.distillation import Taught, divergence
from fastsam.fed.common.checks import number


@dataclass(frozen=True)
class FedNTD(Algorithm):
    """FedAvg whose clients distil the received model's outputs for the classes that a sample does not have.

        f_i = loss(w) + beta * tau^2 * KL(softmax'(out_{w^t}/tau) || softmax'(out_w/tau))

    softmax' is taken over all classes except the sample's label. Labels must number the model's outputs. The server's
    step is FedAvg's. Per round and client 1 P down and 1 P up; state: w. One backward pass and a further forward pass a
    step.

    Args:
        beta: weight of the distillation term.
        tau: temperature.
    """

    beta: float = hparam(1.0, number, at_least=0)
    tau: float = hparam(1.0, number, greater_than=0)

    def local_step(self, server: State, client: State, round: Round) -> Step:
        return Taught(term=self.not_true_distillation)

    def not_true_distillation(self, teacher_outputs: Tensor, y: Tensor, outputs: Tensor) -> Tensor:
        """Return the distillation term. Raises ValueError unless the labels `y` `[n, ...]` number the outputs."""
        if y.is_floating_point() or y.dim() != outputs.dim() - 1:
            raise ValueError("FedNTD needs labels that number the model's outputs")
        classes = torch.arange(outputs.shape[1], device=y.device).view(-1, *[1] * (y.dim() - 1))
        return self.beta * divergence(outputs, teacher_outputs, self.tau, mask=classes == y.unsqueeze(1))
