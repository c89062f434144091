"""Methods whose server averages: FedAvg, FedAdam, FedProx, FedSAM, FedGSAM, FedLESAM."""

from dataclasses import dataclass

from torch import Tensor

from .loop import NU, RoundResults, State, Vector, Visit, add, minus, norm, scale_vector, unit, value_at, zeros


@dataclass
class FedAvg:
    """McMahan et al. 2017, and the shape of every method here."""

    def proximal(self, t: int) -> float:
        """Coefficient of (w - origin) in round t."""
        return 0.0

    def pace(self, k: int, steps: int) -> float:
        """Return the rate of step k of `steps`, divided by the rate of the round."""
        return 1.0

    def start_server(self, w: Vector) -> State:
        return {}

    def start_client(self, w: Vector) -> State:
        return {}

    def begin(self, visit: Visit) -> None:
        """Set the constants of this visit, before the first local step."""

    def origin(self, visit: Visit) -> Vector:
        """Return the start of the local steps, from which delta is measured."""
        return visit.anchor

    def gradient(self, visit: Visit, w: Vector, x: Tensor, y: Tensor) -> Vector:
        """Return the gradient of a batch at the point that the method chooses."""
        return visit.gradient(w, x, y)

    def follow(self, visit: Visit, w: Vector, x: Tensor, y: Tensor) -> Vector:
        """Return the descent direction: gradients and corrections, without the proximal term and weight decay."""
        return self.gradient(visit, w, x, y)

    def finish(self, visit: Visit, delta: Vector) -> State:
        """Return what is sent in addition to delta, after the last local step."""
        return {}

    def serve(self, server: dict, w: Vector, results: RoundResults) -> Vector:
        """Return the next global model."""
        return add(w, scale_vector(results.server_lr, results.mean_move()))


@dataclass
class FedAdam(FedAvg):
    """Reddi et al. 2021, Algorithm 2."""

    beta1: float = 0.9
    beta2: float = 0.99
    tau: float = 0.01
    bias_correction: bool = False
    V0: float = 0.0

    def start_server(self, w: Vector) -> State:
        return {"m": zeros(w), "V": [v + self.V0 for v in zeros(w)]}

    def serve(self, server: State, w: Vector, results: RoundResults) -> Vector:
        move = results.mean_move()
        server["m"] = [self.beta1 * m + (1 - self.beta1) * d for m, d in zip(server["m"], move)]
        server["V"] = [self.beta2 * v + (1 - self.beta2) * d * d for v, d in zip(server["V"], move)]
        m, v = server["m"], server["V"]
        if self.bias_correction:  # Kingma and Ba 2015
            m = [p / (1 - self.beta1 ** (results.t + 1)) for p in m]
            v = [p / (1 - self.beta2 ** (results.t + 1)) for p in v]
        return [p + results.server_lr * a / (b.sqrt() + self.tau) for p, a, b in zip(w, m, v)]


@dataclass
class FedProx(FedAvg):
    """Li et al. 2020: + phi/2*||w - w^t||^2."""

    phi: float = 0.01

    def proximal(self, t: int) -> float:
        return self.phi


@dataclass
class FedSAM(FedAvg):
    """Qu et al. 2022, eq. 4; adaptive: Kwon et al. 2021."""

    rho: float = 0.05
    adaptive: bool = False
    eta: float = 0.0

    def perturbation(self, t: int, w: Vector, g: Vector) -> Vector:
        if not self.adaptive:
            return scale_vector(value_at(t, self.rho), unit(g))
        size = [p.abs() + self.eta for p in w]
        length = norm([s * d for s, d in zip(size, g)])
        return [value_at(t, self.rho) * s * s * d / (length + NU) for s, d in zip(size, g)]

    def gradient(self, visit: Visit, w: Vector, x: Tensor, y: Tensor) -> Vector:
        return visit.gradient(add(w, self.perturbation(visit.t, w, visit.gradient(w, x, y))), x, y)


@dataclass
class FedGSAM(FedSAM):
    """Zhuang et al. 2022 as the local optimizer: g2 less alpha times the part of g1 that is orthogonal to it."""

    alpha: float = 0.1
    rho_min: float | None = None
    lr_min: float = 0.0

    def radius(self, visit: Visit) -> float:
        low = self.rho if self.rho_min is None else self.rho_min
        return low + (self.rho - low) * (visit.lr - self.lr_min) / (visit.first_lr - self.lr_min)

    def gradient(self, visit: Visit, w: Vector, x: Tensor, y: Tensor) -> Vector:
        g1 = visit.gradient(w, x, y)
        g2 = visit.gradient(add(w, scale_vector(self.radius(visit), unit(g1))), x, y)
        inner = sum((a.double() * b.double()).sum().item() for a, b in zip(g1, g2))
        parallel_part = scale_vector(inner / norm(g2) ** 2, g2) if norm(g2) > 0 else zeros(g2)
        return minus(g2, scale_vector(self.alpha, minus(g1, parallel_part)))


@dataclass
class FedLESAM(FedAvg):
    """Fan et al. 2024, Algorithm 1."""

    rho: float = 0.01
    initial_perturbation: str = "origin"
    reference: str = "client"

    def start_server(self, w: Vector) -> State:
        return {"w_last": None}

    def begin(self, visit: Visit) -> None:
        """Set the perturbation of a whole round, towards the model received last time."""
        old = visit.state.get("w_old") if self.reference == "client" else visit.server["w_last"]
        if old is None and self.initial_perturbation == "none":
            visit.notes["eps"] = zeros(visit.anchor)
        else:
            old = zeros(visit.anchor) if old is None else old
            visit.notes["eps"] = scale_vector(value_at(visit.t, self.rho), unit(minus(old, visit.anchor)))

    def gradient(self, visit: Visit, w: Vector, x: Tensor, y: Tensor) -> Vector:
        return visit.gradient(add(w, visit.notes["eps"]), x, y)

    def finish(self, visit: Visit, delta: Vector) -> State:
        visit.state["w_old"] = [p.clone() for p in visit.anchor]
        return {}

    def serve(self, server: State, w: Vector, results: RoundResults) -> Vector:
        server["w_last"] = [p.clone() for p in w]
        return super().serve(server, w, results)
