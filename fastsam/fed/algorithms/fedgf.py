"""FedGF: Lee and Yoon, "Rethinking the Flat Minima Searching in Federated Learning", ICML 2024;
https://github.com/hwan-sig/Official-FedGF."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fastsam.fed.algorithms.base import (
    SAM,
    Aggregate,
    Algorithm,
    ClientResults,
    Round,
    State,
    Step,
    Upload,
    hparam,
)
from fastsam.fed.algorithms.schedule import Scheduled, check_scheduled, value_at
from fastsam.fed.common.checks import integer, number
from fastsam.fed.update.passes import Passes
from fastsam.fed.update.rows import Rows
from fastsam.fed.update.steps import NU


@dataclass(frozen=True, eq=False)
class Pulled(SAM):
    """A step of SAM whose second gradient is taken at `(1 - c)*(w + eps) + c*p`.

    Args:
        p: the point towards which the perturbed weights are pulled.
        c: the share, `[1, 1]`.
    """

    p: Tensor | None = None
    c: Tensor | None = None

    def __call__(self, rows: Rows, passes: Passes) -> Tensor:
        losses, g1 = passes()
        rows.perturb(g1)
        z = rows.z
        z.lerp_(rows["p"].expand_as(z), rows.number("c").to(z.dtype).expand_as(z))
        _, g2 = passes()
        rows.update(g2)
        return losses


@dataclass(frozen=True)
class FedGF(Algorithm):
    """FedSAM with gradients at a point between the client's perturbed weights and the perturbed global model. The point
    is nearer to the global model if clients move far.

        p^t = w^t + rho_g * D/||D||,   D = w^{t-1} - w^t;                    no p in round 0
        w <- w - lr * (g2 + weight_decay*w),   g2 at (1 - c)*(w + rho*g1/||g1||) + c*p^t
        c = the share of the last `window` rounds in which mean_i ||w_i - w^t|| was more than `threshold`

    The server's step is FedAvg's. In the first rounds c is a share of the completed rounds. c = 0 is FedSAM. Per round
    and client 2 P down (w, p) and 1 P up, and a number; state: w, d = D/||D||, and `window` numbers. Two backward
    passes a step.

    Args:
        rho: radius of the clients' perturbation, a number or a schedule.
        rho_g: radius of the global perturbation, a number or a schedule.
        threshold: T_D, which depends on the model. The authors' code has no default; 1 is our choice.
        window: W, number of rounds. The authors' code has no default; 10 is our choice.
    """

    download_vectors: ClassVar[float] = 2

    rho: Scheduled = hparam(0.05, check_scheduled)
    rho_g: Scheduled = hparam(0.05, check_scheduled)
    threshold: float = hparam(1.0, number, at_least=0)
    window: int = hparam(10, integer, at_least=1)

    def init_server(self, w0: Tensor) -> State:
        distances = torch.zeros(self.window, dtype=torch.float64, device=w0.device)
        return {"w": w0, "d": torch.zeros_like(w0), "apart": distances}

    def local_step(self, server: State, client: State, round: Round) -> Step:
        rho, c = value_at("rho", self.rho, round), server["apart"].sum().item() / max(1, min(round.index, self.window))
        if c == 0:
            return SAM(rho=rho)
        p = server["w"] + value_at("rho_g", self.rho_g, round) * server["d"]
        return Pulled(rho=rho, p=p, c=server["apart"].new_full((1, 1), c))

    def finish(self, server: State, client: State, results: ClientResults, round: Round) -> tuple[State, Upload]:
        length = torch.linalg.vector_norm(results.delta, dim=1, keepdim=True, dtype=torch.float64)
        return client, Upload(mean={"delta": results.delta, "length": length})

    def step_server(self, server: State, aggregate: Aggregate, round: Round) -> State:
        new_state = super().step_server(server, aggregate, round)
        D = server["w"].double() - new_state["w"].double()
        d = D / (torch.linalg.vector_norm(D) + NU)
        distances = server["apart"].clone()
        distances[round.index % self.window] = (aggregate.mean("length") > self.threshold).double()
        return {**new_state, "d": d.to(server["d"].dtype), "apart": distances}
