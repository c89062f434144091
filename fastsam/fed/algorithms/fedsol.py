"""FedSOL: Lee, Jeong, Kim, Oh and Yun, "FedSOL: Stabilized Orthogonal Learning with Proximal Restrictions in Federated
Learning", CVPR 2024; the numbers and the weighting of the perturbation as in the authors' code."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from torch import Tensor

from fastsam.fed.algorithms.base import Algorithm, Direction, LocalUpdate, Round, State
from fastsam.fed.algorithms.schedule import Scheduled, check_scheduled, value_at
from fastsam.fed.common.checks import number
from fastsam.fed.step.teacher import Teacher, divergence


@dataclass(frozen=True)
class FedSOL(Algorithm):
    """Local steps whose gradient is taken where the outputs leave those of the received model most: orthogonal to what
    keeps them there.

        g_p = grad_w tau^2 * KL(softmax(out_{w^t}/tau) || softmax(out_w/tau)),   eps = rho * L * g_p/||g_p||
        L   = |w - w^t|, of each parameter over its norms along the first dimension
        w <- w - lr * (g2 + weight_decay*w),   g2 the gradient of the loss alone at w + eps

    A round's first step has no perturbation: w = w^t. rho: a number or a schedule. Classes stand in the outputs' second
    dimension. The server's step is FedAvg's. Per round and client 1 P down and 1 P up; state: w. Two back-propagations
    and a further forward pass a step. rho = 0 is FedAvg.
    """

    working_vectors: ClassVar[float] = 4
    backward_passes: ClassVar[int] = 2

    rho: Scheduled = 1.0
    tau: float = 3.0

    def __post_init__(self) -> None:
        check_scheduled("rho", self.rho)
        number("tau", self.tau, above=0)

    def local_update(self, server: State, client: State, round: Round) -> LocalUpdate:
        teacher = Teacher(server["w"], partial(_term, self.tau), perturbs=True)
        return LocalUpdate(Direction.GRADIENT_BY_DRIFT, rho=value_at("rho", self.rho, round), teacher=teacher)


def _term(tau: float, outputs: Tensor, told: Tensor, y: Tensor) -> Tensor:
    return divergence(outputs, told, tau)
