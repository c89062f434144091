"""Liu et al.: FedSWA and FedMoSWA (2025), FedNSAM (2026)."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from .loop import RoundResults, State, Vector, Visit, add, minus, scale_vector, unit, value_at, zeros
from .plain import FedAvg


@dataclass
class FedSWA(FedAvg):
    """Between the rates lr and rho*lr, on a line."""

    rho: float = 0.1
    alpha: float = 1.5

    def pace(self, k: int, steps: int) -> float:
        return (1 - k / steps) + k / steps * self.rho

    def serve(self, server: State, w: Vector, results: RoundResults) -> Vector:
        return add(w, scale_vector(self.alpha * results.server_lr, results.mean_move()))


@dataclass
class FedMoSWA(FedSWA):
    """The controls are estimates of gradients, from displacements over the rates that made them."""

    gamma: float = 0.4

    def start_server(self, w: Vector) -> State:
        return {"c": zeros(w)}

    def start_client(self, w: Vector) -> State:
        return {"c_i": zeros(w)}

    def follow(self, visit: Visit, w: Vector, x: Tensor, y: Tensor) -> Vector:
        return add(visit.gradient(w, x, y), minus(visit.server["c"], visit.state["c_i"]))

    def finish(self, visit: Visit, delta: Vector) -> State:
        mean_gradient = scale_vector(-1 / visit.rates, delta)  # the mean of g + c - c_i
        visit.state["c_i"] = minus(add(mean_gradient, visit.state["c_i"]), visit.server["c"])
        return {"c_i": [c.clone() for c in visit.state["c_i"]]}

    def serve(self, server: State, w: Vector, results: RoundResults) -> Vector:
        mean = scale_vector(1 / len(results.uploads), add(*[upload["c_i"] for upload in results.uploads.values()]))
        server["c"] = add(scale_vector(1 - self.gamma, server["c"]), scale_vector(self.gamma, mean))
        return super().serve(server, w, results)


@dataclass
class FedNSAM(FedAvg):
    """Nesterov's form: an extrapolation, SAM from there, and the momentum of the result."""

    rho: Any = 0.05
    gamma: float = 0.85
    perturb: str = "gradient"

    def start_server(self, w: Vector) -> State:
        return {"m": zeros(w)}

    def origin(self, visit: Visit) -> Vector:
        return add(visit.anchor, scale_vector(self.gamma, visit.server["m"]))

    def follow(self, visit: Visit, w: Vector, x: Tensor, y: Tensor) -> Vector:
        uphill = visit.gradient(w, x, y) if self.perturb == "gradient" else scale_vector(-1.0, visit.server["m"])
        climb = scale_vector(value_at(visit.t, self.rho), unit(uphill))
        return visit.gradient(add(w, climb), x, y)

    def serve(self, server: State, w: Vector, results: RoundResults) -> Vector:
        server["m"] = add(scale_vector(self.gamma, server["m"]), results.mean_move())
        return add(w, scale_vector(results.server_lr, server["m"]))
