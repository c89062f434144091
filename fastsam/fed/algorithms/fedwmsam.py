"""FedWMSAM: Li, Huang et al., "FedWMSAM: Fast and Flat Federated Learning via Weighted Momentum and Sharpness-Aware
Minimization", NeurIPS 2025; https://github.com/Huang-Yongzhi/NeurlPS_FedWMSAM."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fastsam.fed.algorithms.base import Aggregate, ClientResults, Round, State, Step, Upload, hparam
from fastsam.fed.algorithms.cosines import cosines
from fastsam.fed.algorithms.scaffold import SCAFFOLD
from fastsam.fed.algorithms.schedule import Scheduled, check_scheduled, value_at
from fastsam.fed.common.checks import number
from fastsam.fed.update.passes import Passes
from fastsam.fed.update.rows import Rows
from fastsam.fed.update.steps import Number
from fastsam_kernels.hparams import HParam

MIN_TARGET, MAX_TARGET = 0.1, 0.9  # bounds of the value that alpha moves towards


@dataclass(frozen=True, eq=False)
class AlongPath(Step):
    """A step whose gradient is taken at `w + rho*d/||d||` with `d = w^t + k*D - w` in step k. d is known before any
    gradient, so one pass suffices.

    Args:
        rho: radius of the perturbation.
        D: the step of the path.
    """

    columns: ClassVar[Mapping[str, int]] = {**Step.columns, "rho": HParam.RHO}
    two_buffers: ClassVar[bool] = True

    rho: Number = 0.01
    D: Tensor | None = None

    def begin(self, rows: Rows, w: Tensor, lr: float, passes: Passes) -> None:
        super().begin(rows, w, lr, passes)
        rows["path"].zero_()  # k*D
        rows["direction"].zero_()

    def __call__(self, rows: Rows, passes: Passes) -> Tensor:
        assert rows.w is not None
        d = torch.sub(rows.w, rows["start"], out=rows["direction"]).mul_(-1.0).add_(rows["path"])
        rows.perturb(rows.whole(d))
        rows["path"].add_(rows["D"])
        losses, g = passes()
        rows.update(g)
        return losses


@dataclass(frozen=True)
class FedWMSAM(SCAFFOLD):
    """SAM steps at the price of SGD, perturbed away from where the server's momentum leads, which every client corrects
    by control variates.

        D_i = D + alpha/(1 - alpha) * (c - c_i)
        d_k = (w^t + k*D_i) - w,   eps = rho * d_k/||d_k||      in local step k = 0, 1, ...; eps = 0 in the first step
        w <- w - lr * (alpha*g + (1 - alpha)*D_i + weight_decay*w),    g the batch gradient at w + eps
        D <- -mean_i (w_i - w^t)/(lr_t*K_i);    c_i, c and the server's step as in SCAFFOLD
        alpha <- (1 - alpha_rate)*alpha + alpha_rate*clip(1 + mean_i cos(w_i - w^t, D), 0.1, 0.9)

    The cosine is with the D that was sent. D is signed like a gradient: the global model moves along -D. So both parts
    of d_k, k*D_i and the way back to w^t, lead uphill, as a perturbation of SAM must. The authors' code subtracts d_k,
    and shifts each tensor by one number of it; we follow the paper. With alpha_rate = 0 and rho = 0 it is FedCM with
    control variates. Per round and client 3 P down (w, D, c) and 2 P up, and a number; state: w, D, c, and c_i on every
    client. One backward pass a step.

    Args:
        rho: radius of the perturbation, a number or a schedule.
        alpha: the first alpha.
        alpha_rate: rate at which alpha moves.
    """

    download_vectors: ClassVar[float] = 3

    rho: Scheduled = hparam(0.01, check_scheduled)
    alpha: float = hparam(0.1, number, greater_than=0, at_most=MAX_TARGET)
    alpha_rate: float = hparam(0.01, number, at_least=0, at_most=1)

    def init_server(self, w0: Tensor) -> State:
        alpha = torch.full((1,), self.alpha, dtype=torch.float64, device=w0.device)
        return {**super().init_server(w0), "D": torch.zeros_like(w0), "alpha": alpha}

    def local_step(self, server: State, client: State, round: Round) -> Step:
        rho, alpha = value_at("rho", self.rho, round), server["alpha"].item()
        D_i = server["D"] + alpha / (1 - alpha) * self.correction(server, client)
        return AlongPath(rho=rho, a=alpha, q=(1 - alpha) * D_i, D=D_i)

    def finish(self, server: State, client: State, results: ClientResults, round: Round) -> tuple[State, Upload]:
        state, upload = super().finish(server, client, results, round)
        D = results.delta / results.column(-round.lr * K for K in results.num_steps)
        mean = {**upload.mean, "D": D, "cos": cosines(results.delta, server["D"])[:, None]}
        return state, Upload(mean, upload.sum)

    def step_server(self, server: State, aggregate: Aggregate, round: Round) -> State:
        alignment = (1 + aggregate.mean("cos")).clamp(MIN_TARGET, MAX_TARGET)
        alpha = (1 - self.alpha_rate) * server["alpha"] + self.alpha_rate * alignment
        return {
            **super().step_server(server, aggregate, round),
            "D": aggregate.mean("D").to(server["D"].dtype),
            "alpha": alpha,
        }
