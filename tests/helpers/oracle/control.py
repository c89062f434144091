"""Methods with control variates: SCAFFOLD, FedGAMMA, FedLESAM_S."""

from dataclasses import dataclass

from torch import Tensor

from .loop import RoundResults, State, Vector, Visit, add, minus, scale_vector, zeros
from .plain import FedAvg, FedLESAM, FedSAM


class Control(FedAvg):
    """Karimireddy et al. 2020, option II."""

    control_scale: float = 1.0

    def start_server(self, w: Vector) -> State:
        return {**super().start_server(w), "c": zeros(w)}

    def start_client(self, w: Vector) -> State:
        return {**super().start_client(w), "c_i": zeros(w)}

    def follow(self, visit: Visit, w: Vector, x: Tensor, y: Tensor) -> Vector:
        g = self.gradient(visit, w, x, y)
        return add(g, scale_vector(self.control_scale, minus(visit.server["c"], visit.state["c_i"])))

    def finish(self, visit: Visit, delta: Vector) -> State:
        upload = super().finish(visit, delta)
        old, c = visit.state["c_i"], visit.server["c"]
        visit.state["c_i"] = [a - b - d / (visit.lr * visit.steps) for a, b, d in zip(old, c, delta)]
        return {**upload, "dc": minus(visit.state["c_i"], old)}

    def serve(self, server: State, w: Vector, results: RoundResults) -> Vector:
        for upload in results.uploads.values():
            server["c"] = add(server["c"], scale_vector(1 / results.clients, upload["dc"]))
        return super().serve(server, w, results)


@dataclass
class SCAFFOLD(Control, FedAvg):
    pass


@dataclass
class FedGAMMA(Control, FedSAM):
    """Dai et al. 2023: SCAFFOLD on SAM gradients; the perturbation follows the uncorrected gradient."""


@dataclass
class FedLESAM_S(Control, FedLESAM):
    """Fan et al. 2024, Algorithm 3 with SCAFFOLD's own signs."""

    control_scale: float = 1.0
