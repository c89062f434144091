"""FedAdamW, whose clients take steps of AdamW."""

from dataclasses import dataclass

import torch
from torch import Tensor

from .loop import RoundResults, State, Vector, Visit, add, scale_vector, unit, zeros
from .plain import FedAvg


@dataclass
class FedAdamW(FedAvg):
    """Liu et al. 2026, Algorithm 2; with rho a step of SAM finds the gradient. The options of AdamW are parameters."""

    alpha: float = 0.5
    rho: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01

    def start_server(self, w: Vector) -> State:
        return {"D": zeros(w), "v": zeros(w), "t": 0.0}

    def begin(self, visit: Visit) -> None:
        visit.notes = {"m": zeros(visit.anchor), "v": visit.server["v"]}

    def gradient(self, visit: Visit, w: Vector, x: Tensor, y: Tensor) -> Vector:
        g = visit.gradient(w, x, y)
        return visit.gradient(add(w, scale_vector(self.rho, unit(g))), x, y) if self.rho else g

    def follow(self, visit: Visit, w: Vector, x: Tensor, y: Tensor) -> Vector:
        b1, b2 = self.betas
        k, t = visit.steps + 1, visit.server["t"] + visit.steps + 1
        g = self.gradient(visit, w, x, y)
        m = visit.notes["m"] = [b1 * old + (1 - b1) * new for old, new in zip(visit.notes["m"], g)]
        v = visit.notes["v"] = [b2 * old + (1 - b2) * new * new for old, new in zip(visit.notes["v"], g)]
        step = [p / (1 - b1**k) / ((q / (1 - b2**t)).sqrt() + self.eps) for p, q in zip(m, v)]
        return add(step, scale_vector(self.alpha, visit.server["D"]), scale_vector(self.weight_decay, w))

    def finish(self, visit: Visit, delta: Vector) -> State:
        means = [q.mean() for q in visit.notes["v"]]
        D = scale_vector(-1 / (visit.lr * visit.steps), delta)
        return {"D": D, "v": means, "K": [torch.tensor(float(visit.steps), dtype=torch.float64)]}

    def serve(self, server: State, w: Vector, results: RoundResults) -> Vector:
        server["D"] = results.mean_upload("D")
        server["v"] = [torch.zeros_like(p) + mean for p, mean in zip(w, results.mean_upload("v"))]
        server["t"] += float(results.mean_upload("K")[0])
        return super().serve(server, w, results)
