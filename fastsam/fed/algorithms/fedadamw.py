"""FedAdamW: Liu, Shang, Zhu, Liu, Liu and Liu, "FedAdamW: A Communication-Efficient Optimizer with Convergence and
Generalization Guarantees for Federated Large Models", AAAI 2026, arXiv 2510.27486 (Algorithm 2);
https://github.com/junkangLiu0/FedAdamW."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from fastsam.fed.algorithms.base import SAM, Aggregate, ClientResults, Round, State, Step, Upload, hparam
from fastsam.fed.algorithms.fedcm import COUNTS, ServerDirection
from fastsam.fed.algorithms.schedule import Scheduled, check_scheduled, value_at
from fastsam.fed.common.checks import choice, number
from fastsam.fed.update.parameter_layout import ParameterLayout
from fastsam.fed.update.passes import Passes
from fastsam.fed.update.rows import Rows
from fastsam_kernels.hparams import HParam
from fastsam_kernels.rules import adam

V = "exp_avg_sq"  # name of the second moments in Adam's state


@dataclass(frozen=True, eq=False)
class Leaning(Step):
    """A step plus `-lr*o`, whose second moments have the gradients of earlier steps.

    Args:
        o: a constant that is added to the step of all weights, outside of the optimizer and of clipping.
        seen: number of earlier steps, `[1, 1]`. Adam's bias correction of second moments counts them too.
    """

    o: Tensor | None = None
    seen: Tensor | None = None

    def begin(self, rows: Rows, w: Tensor, lr: float, passes: Passes) -> None:
        super().begin(rows, w, lr, passes)
        rows.column(adam.V_WEIGHT).copy_(1 - rows.rule.columns[adam.BETA2] ** rows.number("seen"))

    def __call__(self, rows: Rows, passes: Passes) -> Tensor:
        losses = super().__call__(rows, passes)
        rate = rows.column(HParam.LR).to(rows.z.dtype)
        for weights in (rows.z,) if rows.w is None else (rows.z, rows.w):
            weights.addcmul_(rows["o"], rate, value=-1)
        return losses


@dataclass(frozen=True, eq=False)
class LeaningSAM(Leaning, SAM):
    """`Leaning` with a step of SAM."""


@dataclass(frozen=True)
class FedAdamW(ServerDirection):
    """Local AdamW that follows the last round's global direction D as well, and begins with the clients' mean second
    moments.

        m = 0, V = v^t;  in step k:  m <- b1*m + (1 - b1)*g,  V <- b2*V + (1 - b2)*g^2
        w <- w - lr * (m/(1 - b1^k) / (sqrt(V/(1 - b2^(n+k))) + eps) + alpha*D^t + weight_decay*w)
        D^{t+1} = -mean_i (w_i - w^t)/(lr_t*K_i),  D^0 = 0;  the server's step is FedAvg's
        v^{t+1} = mean_i of the means of V_i over each parameter tensor,  v^0 = 0;  n is the sum of all mean_i K_i

    b1, b2, eps and weight_decay are options of the run's optimizer: AdamW, the default, or Adam. A block of the paper
    is a parameter tensor. The paper prints `-weight_decay*w`, but describes a decay. The authors' code averages V
    element by element, and corrects both moments by n + k; we follow the paper. Per round and client 2 P down (w, D)
    and 1 P up, and a number for each parameter tensor both ways; state: w, D, v. One backward pass a step, two with
    rho.

    Args:
        alpha: weight of the global direction.
        rho: radius of SAM steps, a number or a schedule; 0 is the paper's algorithm. g is then the gradient at
            `w + rho*g1/||g1||`.
        momentum_K: K_i in D counts local "steps" or local "epochs".
    """

    local_optimizer: ClassVar[str] = "AdamW"

    alpha: float = hparam(0.5, number, at_least=0)
    rho: Scheduled = hparam(0.0, check_scheduled)
    momentum_K: str = hparam("steps", choice, COUNTS)

    def init_server(self, w0: Tensor) -> State:
        n = torch.zeros(1, dtype=torch.float64, device=w0.device)
        return {**super().init_server(w0), "v": torch.zeros_like(w0), "n": n}

    def local_step(self, server: State, client: State, round: Round) -> Step:
        given: dict[str, Any] = {
            "o": self.alpha * server["D"], "seen": server["n"].view(1, 1), "state": {V: server["v"][None]},
        }  # fmt: skip
        return Leaning(**given) if self.rho == 0 else LeaningSAM(rho=value_at("rho", self.rho, round), **given)

    def finish(self, server: State, client: State, results: ClientResults, round: Round) -> tuple[State, Upload]:
        state, upload = super().finish(server, client, results, round)
        assert results.optimizer_state is not None  # the local update has a state
        v, n = block_means(results.optimizer_state[V], round.layout), results.column(results.num_steps)
        return state, Upload({**upload.mean, "v": v, "n": n})

    def step_server(self, server: State, aggregate: Aggregate, round: Round) -> State:
        v, n = torch.zeros_like(server["v"]), server["n"] + aggregate.mean("n")
        for view, mean in zip(round.layout.unflatten(v).values(), aggregate.mean("v"), strict=True):
            view.copy_(mean)
        return {**super().step_server(server, aggregate, round), "v": v, "n": n}


def block_means(rows: Tensor, layout: ParameterLayout) -> Tensor:
    """Return the mean of rows `[n, row_size]` over each parameter tensor, float64 `[n, parameters]`."""
    views = layout.unflatten(rows).values()
    return torch.stack([view.double().reshape(len(rows), -1).mean(1) for view in views], dim=1)
