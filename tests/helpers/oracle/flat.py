"""Methods whose perturbation knows more than the batch: FedWMSAM, FedTOGA, FedGF, FedSCAM."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from .control import Control
from .dynamic import Dynamic
from .loop import End, Kept, Vector, Visit, add, at, minus, norm, scaled, unit, zeros
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

    def start_server(self, w: Vector) -> Kept:
        return {**super().start_server(w), "Delta": zeros(w), "alpha": self.alpha}

    def follow(self, visit: Visit, w: Vector, x: Tensor, y: Tensor) -> Vector:
        alpha, difference = visit.server["alpha"], minus(visit.server["c"], visit.mine["c_i"])
        Delta = add(visit.server["Delta"], scaled(alpha / (1 - alpha), difference))
        predicted = add(visit.anchor, scaled(visit.steps, Delta))
        g = visit.gradient(add(w, scaled(at(visit.t, self.rho), unit(minus(predicted, w)))), x, y)
        return add(scaled(alpha, g), scaled(1 - alpha, Delta))

    def finish(self, visit: Visit, delta: Vector) -> Kept:
        Delta, sent = visit.server["Delta"], super().finish(visit, delta)
        return {**sent, "Delta": scaled(-1 / (visit.lr * visit.steps), delta), "cos": cosine(delta, Delta)}

    def serve(self, server: Kept, w: Vector, end: End) -> Vector:
        agreement = 1 + sum(end.share[i] * sent["cos"] for i, sent in end.sent.items())
        server["alpha"] += self.alpha_rate * (min(max(agreement, 0.1), 0.9) - server["alpha"])
        server["Delta"] = end.mean_sent("Delta")
        return super().serve(server, w, end)


@dataclass
class FedTOGA(Dynamic, FedAvg):
    """Li et al. 2024: the perturbation leans towards the last global update, and the last gradient."""

    rho: Any = 0.1
    kappa: float = 1.0
    phi: float = 0.1
    beta: float = 0.9
    phi_decay: float = 1.0

    def start_server(self, w: Vector) -> Kept:
        return {**super().start_server(w), "Delta": zeros(w)}

    def begin(self, visit: Visit) -> None:
        visit.notes["last"] = zeros(visit.anchor)

    def gradient(self, visit: Visit, w: Vector, x: Tensor, y: Tensor) -> Vector:
        d = add(visit.gradient(w, x, y), scaled(self.kappa, visit.server["Delta"]), visit.notes["last"])
        visit.notes["last"] = g2 = visit.gradient(add(w, scaled(at(visit.t, self.rho), unit(d))), x, y)
        return g2

    def follow(self, visit: Visit, w: Vector, x: Tensor, y: Tensor) -> Vector:
        return add(super().follow(visit, w, x, y), scaled(self.beta, visit.server["Delta"]))

    def serve(self, server: Kept, w: Vector, end: End) -> Vector:
        server["Delta"] = scaled(-1, end.mean_move())
        return super().serve(server, w, end)


@dataclass
class FedGF(FedSAM):
    """Lee and Yoon 2024: between the perturbed client and the perturbed global model."""

    rho_g: Any = 0.05
    threshold: float = 1.0
    window: int = 10

    def start_server(self, w: Vector) -> Kept:
        return {"D": None, "indicators": []}

    def gradient(self, visit: Visit, w: Vector, x: Tensor, y: Tensor) -> Vector:
        recent = visit.server["indicators"][-self.window :]
        c = sum(recent) / max(len(recent), 1)
        perturbed = add(w, self.perturbation(visit.t, w, visit.gradient(w, x, y)))
        if c == 0:
            return visit.gradient(perturbed, x, y)
        p = add(visit.anchor, scaled(at(visit.t, self.rho_g), unit(visit.server["D"])))
        return visit.gradient(add(scaled(1 - c, perturbed), scaled(c, p)), x, y)

    def serve(self, server: Kept, w: Vector, end: End) -> Vector:
        after = super().serve(server, w, end)
        server["D"] = minus(w, after)
        server["indicators"].append(sum(end.share[i] * norm(d) for i, d in end.delta.items()) > self.threshold)
        return after


@dataclass
class FedSCAM(FedSAM):
    """Rahil et al. 2025: radius and credit fall with the norms of pilot gradients, and rise with their agreement with
    the last step."""

    alpha: float = 1.0
    gamma: float = 1.0
    beta: float = 0.8
    kappa: float = 1.0
    pilots: int = 3

    def start_server(self, w: Vector) -> Kept:
        return {"u": zeros(w)}

    def begin(self, visit: Visit) -> None:
        batches = visit.batches[: self.pilots]
        gradients = [visit.gradient(visit.anchor, visit.x[indices], visit.y[indices]) for indices in batches]
        s = scaled(-1 / len(gradients), add(*gradients))
        visit.notes["c"] = c = cosine(s, visit.server["u"])
        visit.notes["h"] = sum(map(norm, gradients)) / len(gradients) * max(0.0, 1 - self.kappa * c)

    def gradient(self, visit: Visit, w: Vector, x: Tensor, y: Tensor) -> Vector:
        rho = at(visit.t, self.rho) / (1 + self.alpha * visit.notes["h"])
        return visit.gradient(add(w, scaled(rho, unit(visit.gradient(w, x, y)))), x, y)

    def finish(self, visit: Visit, delta: Vector) -> Kept:
        return {"credit": max(0.0, 1 + self.beta * visit.notes["c"]) / (1 + self.gamma * visit.notes["h"])}

    def serve(self, server: Kept, w: Vector, end: End) -> Vector:
        S = {i: share * end.sent[i]["credit"] for i, share in end.share.items()}
        moves = [scaled(S[i] / sum(S.values()), delta) for i, delta in end.delta.items()]
        after = add(w, scaled(end.server_lr, add(*moves)))
        server["u"] = minus(after, w)
        return after
