"""FedSCAM: Rahil, Ahmad and Asif, "FedSCAM (Federated Sharpness-Aware Minimization with Clustered Aggregation and
Modulation)", arXiv:2601.00853, 2025 (Section 3, Algorithm 1, by a published transcription of its equations)."""

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
from fastsam.fed.algorithms.cosines import cosines
from fastsam.fed.algorithms.schedule import Scheduled, check_scheduled, value_at
from fastsam.fed.common.checks import integer, number
from fastsam.fed.update.passes import Passes
from fastsam.fed.update.rows import Rows
from fastsam.fed.update.steps import Number
from fastsam_kernels.hparams import HParam


@dataclass(frozen=True, eq=False)
class Piloted(SAM):
    """A step of SAM whose radius follows from the gradients of each client's first batches, which are results.

    Args:
        u: the last global step.
        algorithm: the algorithm, which finds the radius.
    """

    outputs: ClassVar[tuple[str, ...]] = ("gradient", "norms")

    u: Tensor | None = None
    algorithm: FedSCAM | None = None

    def begin(self, rows: Rows, w: Tensor, lr: float, passes: Passes) -> None:
        super().begin(rows, w, lr, passes)
        assert self.algorithm is not None
        gradient, norms = passes.first(self.algorithm.pilots)
        rows.put("gradient", gradient)
        rows.put("norms", norms)
        rows.column(HParam.RHO)[:, 0] = self.algorithm.radius(self.rho, rows["u"], norms[:, 0], gradient)


@dataclass(frozen=True)
class FedSCAM(Algorithm):
    """FedSAM with a smaller radius and less weight for clients whose gradients at w^t are long, or turned away from the
    last global step.

        h_i = mean_b ||g_b||,   c_i = cos(-mean_b g_b, w^t - w^{t-1})
        h_i <- h_i * max(0, 1 - kappa*c_i),    rho_i = rho / (1 + alpha*h_i) in the SAM steps of the round
        w^{t+1} = w^t + server_lr * sum_i S_i*Delta_i / sum_i S_i,    S_i = n_i * max(0, 1 + beta*c_i) / (1 + gamma*h_i)

    g_b are the gradients of the first `pilots` batches at w^t. n_i is the run's weight of the client; the paper's are
    samples, weighting="samples". c_i = 0 in round 0. alpha = beta = gamma = 0 is FedSAM. The paper does not say the
    sign in c_i, the mode of the model, and the batches of the g_b. Here they are as above, evaluation mode, and the
    batches with which local training begins. The paper's optional clusters and projections of the directions are left
    out. Per round and client 2 P down (w, w^t - w^{t-1}) and 1 P up, and a number; state: w, u = w^t - w^{t-1}. Two
    backward passes a step, and one more for each pilot.

    Args:
        rho: largest radius, a number or a schedule.
        alpha: strength of h_i in the radius.
        gamma: strength of h_i in the weight.
        beta: strength of c_i in the weight.
        kappa: strength of c_i in h_i.
        pilots: number of batches whose gradients are taken at w^t.
    """

    download_vectors: ClassVar[float] = 2
    sends_weights: ClassVar[bool] = True

    rho: Scheduled = hparam(0.05, check_scheduled)
    alpha: float = hparam(1.0, number, at_least=0)
    gamma: float = hparam(1.0, number, at_least=0)
    beta: float = hparam(0.8, number, at_least=0)
    kappa: float = hparam(1.0, number, at_least=0)
    pilots: int = hparam(3, integer, at_least=1)

    def init_server(self, w0: Tensor) -> State:
        return {"w": w0, "u": torch.zeros_like(w0)}

    def local_step(self, server: State, client: State, round: Round) -> Step:
        return Piloted(rho=value_at("rho", self.rho, round), u=server["u"], algorithm=self)

    def radius(self, rho: Number, u: Tensor, norms: Tensor, gradients: Tensor) -> Tensor:
        """Return the radii `[n]` of clients with these mean norms and gradients."""
        return rho / (1 + self.alpha * self._orthogonal(norms, cosines(-gradients, u)))

    def _orthogonal(self, h: Tensor, c: Tensor) -> Tensor:
        return h * (1 - self.kappa * c).clamp(min=0)

    def finish(self, server: State, client: State, results: ClientResults, round: Round) -> tuple[State, Upload]:
        c, norms = cosines(-results.outputs["gradient"], server["u"]), results.outputs["norms"][:, 0]
        weight = (1 + self.beta * c).clamp(min=0) / (1 + self.gamma * self._orthogonal(norms, c))
        return client, Upload(mean={"delta": results.delta}, weight=weight)

    def step_server(self, server: State, aggregate: Aggregate, round: Round) -> State:
        new_state = super().step_server(server, aggregate, round)
        u = new_state["w"].double() - server["w"].double()
        return {**new_state, "u": u.to(server["u"].dtype)}
