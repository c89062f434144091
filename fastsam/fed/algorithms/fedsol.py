"""FedSOL: Lee, Jeong, Kim, Oh and Yun, "FedSOL: Stabilized Orthogonal Learning with Proximal Restrictions in Federated
Learning", CVPR 2024; the numbers and the weighting of the perturbation as in the authors' code."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from fastsam.fed.algorithms.base import Algorithm, Client, Direction, LocalUpdate, Round, State, hparam
from fastsam.fed.algorithms.distillation import divergence
from fastsam.fed.algorithms.schedule import Scheduled, check_scheduled, value_at
from fastsam.fed.common.checks import number


@dataclass(frozen=True)
class FedSOL(Algorithm):
    """Local steps whose gradient is taken at weights that are perturbed along the gradient of a proximal term: the
    divergence from the received model's outputs.

        g_p = grad_w tau^2 * KL(softmax(out_{w^t}/tau) || softmax(out_w/tau)),   eps = rho * L * g_p/||g_p||
        L   = |w - w^t|, of each parameter over its norms along the first dimension
        w <- w - lr * (g2 + weight_decay*w),   g2 the gradient of the loss alone at w + eps

    The first step of a round has no perturbation, because w = w^t. Classes are the outputs' second dimension. The
    server's step is FedAvg's. Per round and client 1 P down and 1 P up; state: w. Two backward passes and a further
    forward pass a step. rho = 0 is FedAvg.

    Args:
        rho: radius of the perturbation, a number or a schedule.
        tau: temperature.
    """

    working_vectors: ClassVar[float] = 4
    backward_passes: ClassVar[int] = 2

    rho: Scheduled = hparam(1.0, check_scheduled)
    tau: float = hparam(3.0, number, greater_than=0)

    def local_update(self, server: State, client: State, round: Round) -> LocalUpdate:
        return LocalUpdate(Direction.GRADIENT_BY_DRIFT, rho=value_at("rho", self.rho, round))

    def train_client(self, client: Client, server: State, state: State, round: Round) -> None:
        teacher = client.teacher(server["w"])
        for x, y in client.batches():
            with torch.no_grad():
                teacher_outputs = teacher(x)
            client.step(x, y, first_objective=partial(self.proximal_divergence, teacher_outputs))

    def proximal_divergence(self, teacher_outputs: Tensor, outputs: Tensor) -> Tensor:
        """Return the divergence whose gradient is the direction of the perturbation."""
        return divergence(outputs, teacher_outputs, self.tau)
