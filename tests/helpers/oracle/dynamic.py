"""Methods with dynamic regularisation: FedDyn, FedSMOO, FedLESAM_D, FedSpeed."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from .loop import End, Kept, Vector, Visit, add, minus, norm, scale_vector, unit, value_at, zeros
from .plain import FedAvg, FedLESAM


class Dynamic(FedAvg):
    """Acar et al. 2021, with lambda_i = -phi*h_i: the duals are kept as sums of displacements."""

    phi: float
    phi_decay: float = 1.0

    def proximal(self, t: int) -> float:
        return self.phi * self.phi_decay**t

    def start_server(self, w: Vector) -> Kept:
        return {**super().start_server(w), "H": zeros(w)}

    def start_client(self, w: Vector) -> Kept:
        return {**super().start_client(w), "h": zeros(w)}

    def follow(self, visit: Visit, w: Vector, x: Tensor, y: Tensor) -> Vector:
        g = self.gradient(visit, w, x, y)
        dual = scale_vector(-self.proximal(visit.t), visit.mine["h"])
        return minus(g, dual)

    def finish(self, visit: Visit, delta: Vector) -> Kept:
        upload = super().finish(visit, delta)
        visit.mine["h"] = add(visit.mine["h"], delta)
        return upload

    def serve(self, server: Kept, w: Vector, end: End) -> Vector:
        super().serve(server, w, end)  # the state of the other half; the model follows below
        for delta in end.delta.values():
            server["H"] = add(server["H"], scale_vector(1 / end.clients, delta))
        return add(w, end.mean_move(), server["H"])


@dataclass
class FedDyn(Dynamic, FedAvg):
    phi: float = 0.1
    phi_decay: float = 1.0


@dataclass
class FedLESAM_D(Dynamic, FedLESAM):
    """Fan et al. 2024, Algorithm 4 with FedDyn's own signs."""

    phi: float = 0.1
    phi_decay: float = 1.0


class Smooth(FedAvg):
    """Sun et al. 2023 (FedSMOO): the clients agree on one perturbation s by ADMM."""

    rho: Any
    alpha: float
    s_rule: str

    def start_server(self, w: Vector) -> Kept:
        return {"s": zeros(w)}

    def start_client(self, w: Vector) -> Kept:
        return {"mu": zeros(w)}

    def gradient(self, visit: Visit, w: Vector, x: Tensor, y: Tensor) -> Vector:
        mu, s = visit.mine["mu"], visit.server["s"]
        g1 = visit.gradient(w, x, y)
        direction = [self.alpha * (g - m) - p for g, m, p in zip(g1, mu, s)]
        eps = scale_vector(value_at(visit.t, self.rho), unit(direction))
        visit.mine["mu"] = [m + (e - p) / self.alpha for m, e, p in zip(mu, eps, s)]
        visit.notes["eps"] = eps
        return visit.gradient(add(w, eps), x, y)

    def finish(self, visit: Visit, delta: Vector) -> Kept:
        return {"mu": visit.mine["mu"], "r": minus(scale_vector(self.alpha, visit.mine["mu"]), visit.notes["eps"])}

    def serve(self, server: Kept, w: Vector, end: End) -> Vector:
        if self.s_rule == "paper":
            direction = end.mean_sent("r")
        elif self.s_rule == "mu_active":
            direction = end.mean_sent("mu")
        else:
            direction = scale_vector(-1 / end.clients, add(*[kept["mu"] for kept in end.kept.values()]))
        server["s"] = scale_vector(value_at(end.t, self.rho), unit(direction)) if norm(direction) > 0 else zeros(w)
        return super().serve(server, w, end)


@dataclass
class _SmoothAlone(Smooth):
    """FedSMOO without its FedDyn half."""

    rho: Any = 0.1
    alpha: float = 1.0
    phi: float = 0.1
    s_rule: str = "paper"
    phi_decay: float = 1.0


@dataclass
class _SmoothDynamic(Dynamic, _SmoothAlone):
    pass


def FedSMOO(
    rho: Any = 0.1,
    alpha: float = 1.0,
    phi: float = 0.1,
    s_rule: str = "paper",
    dyn: bool = True,
    phi_decay: float = 1.0,
) -> _SmoothAlone:
    return (_SmoothDynamic if dyn else _SmoothAlone)(rho, alpha, phi, s_rule, phi_decay)


@dataclass
class FedSpeed(FedAvg):
    """Sun et al. 2023 (FedSpeed), Algorithm 1, with 1/lambda = phi and ghat_i as printed there."""

    rho: float = 0.1
    alpha: float = 1.0
    phi: float = 0.1

    def proximal(self, t: int) -> float:
        return self.phi

    def start_client(self, w: Vector) -> Kept:
        return {"ghat": zeros(w)}

    def follow(self, visit: Visit, w: Vector, x: Tensor, y: Tensor) -> Vector:
        g1 = visit.gradient(w, x, y)
        g2 = visit.gradient(add(w, scale_vector(value_at(visit.t, self.rho), unit(g1))), x, y)
        mixture = [(1 - self.alpha) * a + self.alpha * b for a, b in zip(g1, g2)]
        return minus(mixture, visit.mine["ghat"])

    def finish(self, visit: Visit, delta: Vector) -> Kept:
        visit.mine["ghat"] = minus(visit.mine["ghat"], scale_vector(self.phi, delta))
        return {"amended": minus(delta, scale_vector(1 / self.phi, visit.mine["ghat"]))}

    def serve(self, server: Kept, w: Vector, end: End) -> Vector:
        return add(w, scale_vector(end.server_lr, end.mean_sent("amended")))


@dataclass
class FedGloSS(Dynamic, FedAvg):
    """Caldarola et al. 2025, Algorithm 1 as printed, with beta = 1/phi."""

    rho: Any = 0.15
    rho_local: Any = 0.15
    phi: float = 0.1
    phi_decay: float = 1.0

    def start_server(self, w: Vector) -> Kept:
        return {"sigma": zeros(w), "pseudo": None}

    def start_client(self, w: Vector) -> Kept:
        return {"sigma": zeros(w)}

    def origin(self, visit: Visit) -> Vector:
        pseudo = visit.server["pseudo"]
        if pseudo is None:
            return visit.anchor
        return add(visit.anchor, scale_vector(value_at(visit.t, self.rho), unit(pseudo)))

    def follow(self, visit: Visit, w: Vector, x: Tensor, y: Tensor) -> Vector:
        g = visit.gradient(w, x, y)
        if self.rho_local != 0:
            g = visit.gradient(add(w, scale_vector(value_at(visit.t, self.rho_local), unit(g))), x, y)
        return minus(g, visit.mine["sigma"])

    def finish(self, visit: Visit, delta: Vector) -> Kept:
        visit.mine["sigma"] = minus(visit.mine["sigma"], scale_vector(self.phi, delta))
        return {}

    def serve(self, server: Kept, w: Vector, end: End) -> Vector:
        total = add(*end.delta.values())
        server["sigma"] = minus(server["sigma"], scale_vector(self.phi / end.clients, total))
        server["pseudo"] = scale_vector(-1, end.mean_move())
        return minus(minus(w, server["pseudo"]), scale_vector(1 / self.phi, server["sigma"]))
