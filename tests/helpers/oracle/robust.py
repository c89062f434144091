"""FedRobust: an affine map of a client's inputs ascends while the weights descend (Reisizadeh et al. 2020)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from .loop import Vector, Visit
from .plain import FedAvg


@dataclass
class FedRobust(FedAvg):
    lam: float = 1.0
    eta_2: float | None = None
    ascent_steps: int = 1
    form: str = "full"
    radius: tuple[float, float] | None = None

    def begin(self, visit: Visit) -> None:
        if "map" not in visit.state:
            shape = visit.x.shape[1:]
            if self.form == "diag":
                matrix, shift = torch.ones(shape), torch.zeros(shape)
            else:
                width = shape.numel() if self.form == "full" else shape[0]
                matrix, shift = torch.eye(width), torch.zeros(width)
            visit.state["identity"] = matrix.to(visit.x)
            visit.state["map"], visit.state["shift"] = matrix.to(visit.x), shift.to(visit.x)

    def move(self, x: Tensor, matrix: Tensor, shift: Tensor) -> Tensor:
        if self.form == "diag":
            return x * matrix + shift
        if self.form == "full":
            flat = x.reshape(len(x), -1)
            return torch.stack([matrix @ row + shift for row in flat]).reshape(x.shape)
        return torch.einsum("dc,nc...->nd...", matrix, x) + shift.reshape(-1, *[1] * (x.ndim - 2))

    def gradient(self, visit: Visit, w: Vector, x: Tensor, y: Tensor) -> Vector:
        eta_2 = visit.lr if self.eta_2 is None else self.eta_2
        for _ in range(self.ascent_steps):
            matrix = visit.state["map"].clone().requires_grad_()
            shift = visit.state["shift"].clone().requires_grad_()
            fit = visit.loss(w, self.move(x, matrix, shift), y)
            lam = self.lam if self.radius is None else 0.0
            penalty = lam * ((matrix - visit.state["identity"]).square().sum() + shift.square().sum())
            variables = [*visit.model.parameters(), matrix, shift]
            *g, up_matrix, up_shift = torch.autograd.grad(fit - penalty, variables)
            step = (matrix + eta_2 * up_matrix).detach() - visit.state["identity"]
            shift = (shift + eta_2 * up_shift).detach()
            if self.radius is not None:
                step, shift = (v * min(1.0, r / v.norm().item()) for v, r in zip((step, shift), self.radius))
            visit.state["map"], visit.state["shift"] = visit.state["identity"] + step, shift
        return g
