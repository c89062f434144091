"""Methods that differ from FedAvg in the server's step: FedAvgM, FedAdagrad, FedYogi, FedNova, FedExP."""

from dataclasses import dataclass

import torch
from torch import Tensor

from .loop import RoundResults, State, Vector, Visit, add, norm, scale_vector, zeros
from .plain import FedAvg


@dataclass
class FedAvgM(FedAvg):
    """Hsu et al. 2019: v <- beta*v + Delta w, w <- w - v, with the gradient's sign."""

    beta: float = 0.9

    def start_server(self, w: Vector) -> State:
        return {"v": zeros(w)}

    def serve(self, server: State, w: Vector, results: RoundResults) -> Vector:
        server["v"] = [self.beta * v - d for v, d in zip(server["v"], results.mean_move())]
        return [p - results.server_lr * v for p, v in zip(w, server["v"])]


@dataclass
class _Adaptive(FedAvg):
    """Reddi et al. 2021, Algorithm 2."""

    beta1: float = 0.0
    tau: float = 0.01
    V0: float = 0.0

    def grow(self, V: Tensor, d: Tensor) -> Tensor:
        raise NotImplementedError

    def start_server(self, w: Vector) -> State:
        return {"m": zeros(w), "V": [torch.full_like(p, self.V0) for p in w]}

    def serve(self, server: State, w: Vector, results: RoundResults) -> Vector:
        move, new_weights = results.mean_move(), []
        for i, d in enumerate(move):
            server["m"][i] = self.beta1 * server["m"][i] + (1 - self.beta1) * d
            server["V"][i] = self.grow(server["V"][i], d)
            new_weights.append(w[i] + results.server_lr * server["m"][i] / (server["V"][i] ** 0.5 + self.tau))
        return new_weights


@dataclass
class FedAdagrad(_Adaptive):
    def grow(self, V: Tensor, d: Tensor) -> Tensor:
        return V + d * d


@dataclass
class FedYogi(_Adaptive):
    beta1: float = 0.9
    beta2: float = 0.99

    def grow(self, V: Tensor, d: Tensor) -> Tensor:
        square = d * d
        larger = (square > V).double() - (square < V).double()  # 0 where they are equal
        return V + (1 - self.beta2) * square * larger


@dataclass
class FedNova(FedAvg):
    """Wang et al. 2020, eq. 6 with |a_i| of section 4, momentum by its closed form."""

    def finish(self, visit: Visit, delta: Vector) -> State:
        b, K = visit.momentum, visit.steps
        weight = sum((1 - b**k) / (1 - b) for k in range(1, K + 1))
        return {"weight": weight, "direction": scale_vector(1 / weight, delta)}

    def serve(self, server: State, w: Vector, results: RoundResults) -> Vector:
        effective = sum(results.share[i] * upload["weight"] for i, upload in results.uploads.items())
        return add(w, scale_vector(results.server_lr * effective, results.mean_upload("direction")))


@dataclass
class FedExP(FedAvg):
    """Jhunjhunwala et al. 2023, Algorithm 1. Clients train from the iterate, the model is the mean of the last two."""

    eps: float = 1e-3
    average: bool = True

    def start_server(self, w: Vector) -> State:
        return {"x": [p.clone() for p in w]}

    def origin(self, visit: Visit) -> Vector:
        return visit.server["x"]

    def serve(self, server: State, w: Vector, results: RoundResults) -> Vector:
        mean = results.mean_move()
        squares = sum(results.share[i] * norm(delta) ** 2 for i, delta in results.delta.items())
        eta = max(1.0, squares / (2 * (norm(mean) ** 2 + self.eps)))
        old, server["x"] = server["x"], add(server["x"], scale_vector(eta, mean))
        return scale_vector(0.5, add(old, server["x"])) if self.average else server["x"]
