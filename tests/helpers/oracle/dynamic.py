"""Methods with dynamic regularisation: FedDyn, FedSMOO, FedLESAM_D, FedSpeed."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from .loop import RoundResults, State, Vector, Visit, add, minus, norm, scale_vector, unit, value_at, zeros
from .plain import FedAvg, FedLESAM


class Dynamic(FedAvg):
    """Acar et al. 2021, with lambda_i = -phi*h_i: the duals are kept as sums of displacements."""

    phi: float
    phi_decay: float = 1.0

    def proximal(self, t: int) -> float:
        return self.phi * self.phi_decay**t

    def start_server(self, w: Vector) -> State:
        return {**super().start_server(w), "H": zeros(w)}

    def start_client(self, w: Vector) -> State:
        return {**super().start_client(w), "h": zeros(w)}

    def follow(self, visit: Visit, w: Vector, x: Tensor, y: Tensor) -> Vector:
        g = self.gradient(visit, w, x, y)
        dual = scale_vector(-self.proximal(visit.t), visit.state["h"])
        return minus(g, dual)

    def finish(self, visit: Visit, delta: Vector) -> State:
        upload = super().finish(visit, delta)
        visit.state["h"] = add(visit.state["h"], delta)
        return upload

    def serve(self, server: State, w: Vector, results: RoundResults) -> Vector:
        super().serve(server, w, results)  # the state of the other half; the model follows below
        for delta in results.delta.values():
            server["H"] = add(server["H"], scale_vector(1 / results.clients, delta))
        return add(w, results.mean_move(), server["H"])


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

    def start_server(self, w: Vector) -> State:
        return {"s": zeros(w)}

    def start_client(self, w: Vector) -> State:
        return {"mu": zeros(w)}

    def gradient(self, visit: Visit, w: Vector, x: Tensor, y: Tensor) -> Vector:
        mu, s = visit.state["mu"], visit.server["s"]
        g1 = visit.gradient(w, x, y)
        direction = [self.alpha * (g - m) - p for g, m, p in zip(g1, mu, s)]
        eps = scale_vector(value_at(visit.t, self.rho), unit(direction))
        visit.state["mu"] = [m + (e - p) / self.alpha for m, e, p in zip(mu, eps, s)]
        visit.notes["eps"] = eps
        return visit.gradient(add(w, eps), x, y)

    def finish(self, visit: Visit, delta: Vector) -> State:
        return {"mu": visit.state["mu"], "r": minus(scale_vector(self.alpha, visit.state["mu"]), visit.notes["eps"])}

    def serve(self, server: State, w: Vector, results: RoundResults) -> Vector:
        if self.s_rule == "paper":
            direction = results.mean_upload("r")
        elif self.s_rule == "mu_active":
            direction = results.mean_upload("mu")
        else:
            direction = scale_vector(-1 / results.clients, add(*[state["mu"] for state in results.states.values()]))
        server["s"] = scale_vector(value_at(results.t, self.rho), unit(direction)) if norm(direction) > 0 else zeros(w)
        return super().serve(server, w, results)


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

    def start_client(self, w: Vector) -> State:
        return {"ghat": zeros(w)}

    def follow(self, visit: Visit, w: Vector, x: Tensor, y: Tensor) -> Vector:
        g1 = visit.gradient(w, x, y)
        g2 = visit.gradient(add(w, scale_vector(value_at(visit.t, self.rho), unit(g1))), x, y)
        mixture = [(1 - self.alpha) * a + self.alpha * b for a, b in zip(g1, g2)]
        return minus(mixture, visit.state["ghat"])

    def finish(self, visit: Visit, delta: Vector) -> State:
        visit.state["ghat"] = minus(visit.state["ghat"], scale_vector(self.phi, delta))
        return {"amended": minus(delta, scale_vector(1 / self.phi, visit.state["ghat"]))}

    def serve(self, server: State, w: Vector, results: RoundResults) -> Vector:
        return add(w, scale_vector(results.server_lr, results.mean_upload("amended")))


@dataclass
class FedGloSS(Dynamic, FedAvg):
    """Caldarola et al. 2025, Algorithm 1 as printed, with beta = 1/phi."""

    rho: Any = 0.15
    rho_local: Any = 0.15
    phi: float = 0.1
    phi_decay: float = 1.0

    def start_server(self, w: Vector) -> State:
        return {"sigma": zeros(w), "pseudo": None}

    def start_client(self, w: Vector) -> State:
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
        return minus(g, visit.state["sigma"])

    def finish(self, visit: Visit, delta: Vector) -> State:
        visit.state["sigma"] = minus(visit.state["sigma"], scale_vector(self.phi, delta))
        return {}

    def serve(self, server: State, w: Vector, results: RoundResults) -> Vector:
        total = add(*results.delta.values())
        server["sigma"] = minus(server["sigma"], scale_vector(self.phi / results.clients, total))
        server["pseudo"] = scale_vector(-1, results.mean_move())
        return minus(minus(w, server["pseudo"]), scale_vector(1 / self.phi, server["sigma"]))
