"""Methods whose local steps follow a direction of the server: FedCM, MoFedSAM, MimeLite."""

from dataclasses import dataclass

from torch import Tensor

from .loop import RoundResults, State, Vector, Visit, add, scale_vector, zeros
from .plain import FedAvg, FedSAM


class ServerDirection(FedAvg):
    """A direction D of the server: the mean of the clients' displacements, per step or epoch and learning rate."""

    momentum_K: str

    def start_server(self, w: Vector) -> State:
        return {"D": zeros(w)}

    def finish(self, visit: Visit, delta: Vector) -> State:
        K = visit.steps if self.momentum_K == "steps" else visit.epochs
        return {"D": scale_vector(-1 / (visit.lr * K), delta)}

    def serve(self, server: State, w: Vector, results: RoundResults) -> Vector:
        server["D"] = results.mean_upload("D")
        return super().serve(server, w, results)


@dataclass
class FedCM(ServerDirection, FedAvg):
    """Xu et al. 2021: alpha*g + (1 - alpha)*D."""

    alpha: float = 0.1
    momentum_K: str = "steps"

    def follow(self, visit: Visit, w: Vector, x: Tensor, y: Tensor) -> Vector:
        g = self.gradient(visit, w, x, y)
        return add(scale_vector(self.alpha, g), scale_vector(1 - self.alpha, visit.server["D"]))


@dataclass
class MoFedSAM(ServerDirection, FedSAM):
    """Qu et al. 2022, eq. 6: beta*g2 + (1 - beta)*D."""

    beta: float = 0.1
    momentum_K: str = "steps"

    def follow(self, visit: Visit, w: Vector, x: Tensor, y: Tensor) -> Vector:
        g2 = self.gradient(visit, w, x, y)
        return [self.beta * g + (1 - self.beta) * d for g, d in zip(g2, visit.server["D"])]


@dataclass
class MimeLite(FedAvg):
    """Karimireddy et al. 2021, Algorithm 3, SGD with momentum as the base optimizer: m from full gradients at the
    received model."""

    beta: float = 0.1
    momentum_form: str = "convex"

    @property
    def fresh(self) -> float:
        """Return the weight of a new gradient. The old momentum has the weight 1 - beta in both forms."""
        return self.beta if self.momentum_form == "convex" else 1.0

    def start_server(self, w: Vector) -> State:
        return {"m": zeros(w)}

    def follow(self, visit: Visit, w: Vector, x: Tensor, y: Tensor) -> Vector:
        g = visit.gradient(w, x, y)
        return [self.fresh * a + (1 - self.beta) * m for a, m in zip(g, visit.server["m"])]

    def finish(self, visit: Visit, delta: Vector) -> State:
        return {"G": visit.gradient(visit.anchor, visit.x, visit.y)}

    def serve(self, server: State, w: Vector, results: RoundResults) -> Vector:
        G = results.mean_upload("G")
        server["m"] = [self.fresh * a + (1 - self.beta) * m for a, m in zip(G, server["m"])]
        return super().serve(server, w, results)
