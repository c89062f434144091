"""Methods with a term of another model's outputs or features: FedGMT, FedNTD, FedSOL, MOON."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .dynamic import Dynamic
from .loop import RoundResults, State, Vector, Visit, add, minus, scale_vector, unit
from .plain import FedAvg


class Taught(FedAvg):
    """loss(w) + strength * term(outputs at w, outputs of the teacher)."""

    tau: float

    def strength(self) -> float:
        raise NotImplementedError

    def teacher(self, visit: Visit) -> Vector:
        raise NotImplementedError

    def select_outputs(self, out: Tensor, y: Tensor) -> Tensor:
        """Return the logits that are compared."""
        return out

    def gradient(self, visit: Visit, w: Vector, x: Tensor, y: Tensor) -> Vector:
        parameters = list(visit.model.parameters())
        with torch.no_grad():
            for p, value in zip(parameters, self.teacher(visit), strict=True):
                p.copy_(value)
            teacher_outputs = F.softmax(self.select_outputs(visit.model(x), y) / self.tau, dim=1)
        loss = visit.loss(w, x, y)
        outputs = F.log_softmax(self.select_outputs(visit.model(x), y) / self.tau, dim=1)
        term = self.tau**2 * F.kl_div(outputs, teacher_outputs, reduction="batchmean")
        return list(torch.autograd.grad(loss + self.strength() * term, parameters))


@dataclass
class FedGMT(Dynamic, Taught):
    """Li et al. 2025; the server's dual is the mean over all clients, as in the authors' code."""

    gamma: float = 1.0
    alpha: float = 0.95
    tau: float = 3.0
    phi: float = 0.1
    phi_decay: float = 1.0

    def strength(self) -> float:
        return self.gamma

    def teacher(self, visit: Visit) -> Vector:
        return visit.server["EMA"]

    def start_server(self, w: Vector) -> State:
        return {**super().start_server(w), "EMA": [p.clone() for p in w]}

    def proximal(self, t: int) -> float:
        return 0.0

    def follow(self, visit: Visit, w: Vector, x: Tensor, y: Tensor) -> Vector:
        beta = 1 / (self.phi * self.phi_decay**visit.t)
        return add(self.gradient(visit, w, x, y), scale_vector(1 / beta, visit.state["h"]))

    def serve(self, server: State, w: Vector, results: RoundResults) -> Vector:
        new_weights = super().serve(server, w, results)
        server["EMA"] = add(scale_vector(self.alpha, server["EMA"]), scale_vector(1 - self.alpha, new_weights))
        return new_weights


@dataclass
class FedNTD(Taught):
    """Lee et al. 2022: the logits of all classes but the sample's own."""

    beta: float = 1.0
    tau: float = 1.0

    def strength(self) -> float:
        return self.beta

    def teacher(self, visit: Visit) -> Vector:
        return visit.anchor

    def select_outputs(self, out: Tensor, y: Tensor) -> Tensor:
        classes = out.shape[1]
        others = torch.tensor([[c for c in range(classes) if c != label] for label in y.tolist()])
        return out.gather(1, others)


@dataclass
class FedSOL(FedAvg):
    """Lee et al. 2024: perturbed by the term's gradient, weighted by how far each weight has come; the loss's gradient
    there."""

    rho: float = 1.0
    tau: float = 3.0

    def perturbation(self, visit: Visit, w: Vector, x: Tensor, y: Tensor) -> Vector:
        parameters = list(visit.model.parameters())
        outputs = []
        for weights in (visit.anchor, w):
            visit.loss(weights, x, y)  # sets them
            outputs.append(visit.model(x) / self.tau)
        received_probabilities, current = outputs[0].detach().softmax(1), outputs[1].softmax(1)
        term = self.tau**2 * (received_probabilities * (received_probabilities / current).log()).sum() / len(x)
        g_p = unit(list(torch.autograd.grad(term, parameters)))
        far = [p.abs() for p in minus(w, visit.anchor)]
        return [self.rho * f / f.square().sum(0).sqrt().clamp(min=1e-12) * g for f, g in zip(far, g_p, strict=True)]

    def gradient(self, visit: Visit, w: Vector, x: Tensor, y: Tensor) -> Vector:
        return visit.gradient(add(w, self.perturbation(visit, w, x, y)), x, y)


@dataclass
class MOON(FedAvg):
    """Li et al. 2021, eq. 3, for a Sequential: z is the input of its last layer, or the output of the layer
    `features`."""

    mu: float = 1.0
    tau: float = 0.5
    features: str | None = None

    def representation(self, visit: Visit, x: Tensor) -> Tensor:
        layers = list(visit.model.children())
        for layer in layers[:-1] if self.features is None else layers[: int(self.features) + 1]:
            x = layer(x)
        return x

    def start_client(self, w: Vector) -> State:
        return {"last": [p.clone() for p in w]}

    def gradient(self, visit: Visit, w: Vector, x: Tensor, y: Tensor) -> Vector:
        parameters = list(visit.model.parameters())
        features_of_models = []
        with torch.no_grad():
            for other_model in (visit.anchor, visit.state["last"]):
                for p, value in zip(parameters, other_model, strict=True):
                    p.copy_(value)
                features_of_models.append(self.representation(visit, x))
        loss = visit.loss(w, x, y)
        z = self.representation(visit, x)
        near, far = (((z * t).sum(1) / (z.norm(dim=1) * t.norm(dim=1)) / self.tau).exp() for t in features_of_models)
        contrast = -(near / (near + far)).log().mean()
        return list(torch.autograd.grad(loss + self.mu * contrast, parameters, allow_unused=False))

    def finish(self, visit: Visit, delta: Vector) -> State:
        visit.state["last"] = add(visit.anchor, delta)
        return {}
