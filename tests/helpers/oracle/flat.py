"""Methods whose perturbation knows more than the batch: FedWMSAM, FedTOGA, FedGF, FedSCAM."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from .control import Control
from .dynamic import Dynamic
from .loop import RoundResults, State, Vector, Visit, add, minus, norm, scale_vector, unit, value_at, zeros
from .plain import FedAvg, FedSAM


def cosine(a: Vector, b: Vector) -> float:
    """Return the cosine of two vectors, or 0 if one of them is zero."""
    dot = sum((p.double() * q.double()).sum().item() for p, q in zip(a, b, strict=True))
    lengths = norm(a) * norm(b)
    return dot / lengths if lengths else 0.0


@dataclass
class FedWMSAM(Control, FedAvg):
    """Li, Huang et al. 2025, the printed formulas: uphill of the predicted global model."""

    rho: Any = 0.01
    alpha: float = 0.1
    alpha_rate: float = 0.01

    def start_server(self, w: Vector) -> State:
        return {**super().start_server(w), "Delta": zeros(w), "alpha": self.alpha}

    def follow(self, visit: Visit, w: Vector, x: Tensor, y: Tensor) -> Vector:
        alpha, difference = visit.server["alpha"], minus(visit.server["c"], visit.state["c_i"])
        Delta = add(visit.server["Delta"], scale_vector(alpha / (1 - alpha), difference))
        prediction = add(visit.anchor, scale_vector(visit.steps, Delta))
        g = visit.gradient(add(w, scale_vector(value_at(visit.t, self.rho), unit(minus(prediction, w)))), x, y)
        return add(scale_vector(alpha, g), scale_vector(1 - alpha, Delta))

    def finish(self, visit: Visit, delta: Vector) -> State:
        Delta, upload = visit.server["Delta"], super().finish(visit, delta)
        return {**upload, "Delta": scale_vector(-1 / (visit.lr * visit.steps), delta), "cos": cosine(delta, Delta)}

    def serve(self, server: State, w: Vector, results: RoundResults) -> Vector:
        agreement = 1 + sum(results.share[i] * upload["cos"] for i, upload in results.uploads.items())
        server["alpha"] += self.alpha_rate * (min(max(agreement, 0.1), 0.9) - server["alpha"])
        server["Delta"] = results.mean_upload("Delta")
        return super().serve(server, w, results)


@dataclass
class FedTOGA(Dynamic, FedAvg):
    """Li et al. 2024: the perturbation leans towards the last global update, and the last gradient."""

    rho: Any = 0.1
    kappa: float = 1.0
    phi: float = 0.1
    beta: float = 0.9
    phi_decay: float = 1.0

    def start_server(self, w: Vector) -> State:
        return {**super().start_server(w), "Delta": zeros(w)}

    def begin(self, visit: Visit) -> None:
        visit.notes["last"] = zeros(visit.anchor)

    def gradient(self, visit: Visit, w: Vector, x: Tensor, y: Tensor) -> Vector:
        d = add(visit.gradient(w, x, y), scale_vector(self.kappa, visit.server["Delta"]), visit.notes["last"])
        visit.notes["last"] = g2 = visit.gradient(add(w, scale_vector(value_at(visit.t, self.rho), unit(d))), x, y)
        return g2

    def follow(self, visit: Visit, w: Vector, x: Tensor, y: Tensor) -> Vector:
        return add(super().follow(visit, w, x, y), scale_vector(self.beta, visit.server["Delta"]))

    def serve(self, server: State, w: Vector, results: RoundResults) -> Vector:
        server["Delta"] = scale_vector(-1, results.mean_move())
        return super().serve(server, w, results)


@dataclass
class FedGF(FedSAM):
    """Lee and Yoon 2024: between the perturbed client and the perturbed global model."""

    rho_g: Any = 0.05
    threshold: float = 1.0
    window: int = 10

    def start_server(self, w: Vector) -> State:
        return {"D": None, "indicators": []}

    def gradient(self, visit: Visit, w: Vector, x: Tensor, y: Tensor) -> Vector:
        recent = visit.server["indicators"][-self.window :]
        c = sum(recent) / max(len(recent), 1)
        perturbed_weights = add(w, self.perturbation(visit.t, w, visit.gradient(w, x, y)))
        if c == 0:
            return visit.gradient(perturbed_weights, x, y)
        p = add(visit.anchor, scale_vector(value_at(visit.t, self.rho_g), unit(visit.server["D"])))
        return visit.gradient(add(scale_vector(1 - c, perturbed_weights), scale_vector(c, p)), x, y)

    def serve(self, server: State, w: Vector, results: RoundResults) -> Vector:
        new_weights = super().serve(server, w, results)
        server["D"] = minus(w, new_weights)
        server["indicators"].append(sum(results.share[i] * norm(d) for i, d in results.delta.items()) > self.threshold)
        return new_weights


@dataclass
class FedSCAM(FedSAM):
    """Rahil et al. 2025: radius and credit fall with the norms of pilot gradients, and rise with their agreement with
    the last step."""

    alpha: float = 1.0
    gamma: float = 1.0
    beta: float = 0.8
    kappa: float = 1.0
    pilots: int = 3

    def start_server(self, w: Vector) -> State:
        return {"u": zeros(w)}

    def begin(self, visit: Visit) -> None:
        batches = visit.batches[: self.pilots]
        gradients = [visit.gradient(visit.anchor, visit.x[indices], visit.y[indices]) for indices in batches]
        s = scale_vector(-1 / len(gradients), add(*gradients))
        visit.notes["c"] = c = cosine(s, visit.server["u"])
        visit.notes["h"] = sum(map(norm, gradients)) / len(gradients) * max(0.0, 1 - self.kappa * c)

    def gradient(self, visit: Visit, w: Vector, x: Tensor, y: Tensor) -> Vector:
        rho = value_at(visit.t, self.rho) / (1 + self.alpha * visit.notes["h"])
        return visit.gradient(add(w, scale_vector(rho, unit(visit.gradient(w, x, y)))), x, y)

    def finish(self, visit: Visit, delta: Vector) -> State:
        return {"credit": max(0.0, 1 + self.beta * visit.notes["c"]) / (1 + self.gamma * visit.notes["h"])}

    def serve(self, server: State, w: Vector, results: RoundResults) -> Vector:
        S = {i: share * results.uploads[i]["credit"] for i, share in results.share.items()}
        moves = [scale_vector(S[i] / sum(S.values()), delta) for i, delta in results.delta.items()]
        new_weights = add(w, scale_vector(results.server_lr, add(*moves)))
        server["u"] = minus(new_weights, w)
        return new_weights
