"""FedSOL: Lee, Jeong, Kim, Oh and Yun, "FedSOL: Stabilized Orthogonal Learning with Proximal Restrictions in Federated
Learning", CVPR 2024; the numbers and the weighting of the perturbation as in the authors' code."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fastsam.fed.algorithms.base import SAM, Algorithm, Round, State, Step, hparam
from fastsam.fed.algorithms.distillation import divergence
from fastsam.fed.algorithms.schedule import Scheduled, check_scheduled, value_at
from fastsam.fed.common.checks import number
from fastsam.fed.update.gradients import Gradients
from fastsam.fed.update.passes import Passes
from fastsam.fed.update.rows import Rows

MIN_NORM = 1e-12  # norm of a drift that is divided by: a weight that has not moved is not perturbed


@dataclass(frozen=True, eq=False)
class Orthogonal(SAM):
    """A step of SAM along `L*g_p`, whose length is the norm of g_p: the gradient of the divergence from the outputs of
    the start, weighted by how far each weight has come from it.

    Args:
        tau: temperature.
    """

    tau: float = 3.0

    def objective(self, loss: Tensor, outputs: Tensor, y: Tensor, teacher: Tensor) -> Tensor:
        """Return the divergence whose gradient is g_p."""
        return divergence(outputs, teacher, self.tau)

    def begin(self, rows: Rows, w: Tensor, lr: float, passes: Passes) -> None:
        super().begin(rows, w, lr, passes)
        rows["direction"].zero_()

    def __call__(self, rows: Rows, passes: Passes) -> Tensor:
        assert rows.w is not None
        losses, g_p = passes(self.objective, passes.outputs_of(rows["start"]))
        rows.norm(g_p)
        d = torch.sub(rows.w, rows["start"], out=rows["direction"]).abs_()
        for view in rows.layout.views(d):  # [n, *shape]
            far = view if view.dim() > 1 else view.unsqueeze(1)
            far.div_(torch.linalg.vector_norm(far, dim=1, keepdim=True).clamp_(min=MIN_NORM))
        parts = rows.views_like(g_p, d)
        torch._foreach_mul_(parts, g_p.tensors)
        rows.move(Gradients(parts, g_p.slots, g_p.table))
        _, g2 = passes()
        rows.update(g2)
        return losses


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

    rho: Scheduled = hparam(1.0, check_scheduled)
    tau: float = hparam(3.0, number, greater_than=0)

    def local_step(self, server: State, client: State, round: Round) -> Step:
        return Orthogonal(rho=value_at("rho", self.rho, round), tau=self.tau)
