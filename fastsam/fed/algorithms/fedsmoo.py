"""FedSMOO: Sun, Shen, Chen, Ding and Tao, "Dynamic Regularized Sharpness Aware Minimization in Federated Learning:
Approaching Global Consistency and Smooth Landscape", ICML 2023 (Algorithm 1)."""

from __future__ import annotations

from collections.abc import Mapping
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
from fastsam.fed.algorithms.fedavg import FedAvg
from fastsam.fed.algorithms.feddyn import FedDyn
from fastsam.fed.algorithms.schedule import Scheduled, check_scheduled, value_at
from fastsam.fed.common.checks import choice, number
from fastsam.fed.update.passes import Passes
from fastsam.fed.update.rows import Rows
from fastsam.fed.update.steps import NU, Number
from fastsam_kernels.hparams import HParam

RULES = ("paper", "mu_active", "mu_all")


@dataclass(frozen=True, eq=False)
class DualSAM(SAM):
    """A step of SAM along `d = penalty*(g - dual) - s`, then `dual <- dual + (eps - s)/penalty`.

    Args:
        dual: mu_i at the start.
        s: the perturbation of all clients.
        penalty: alpha.
    """

    columns: ClassVar[Mapping[str, int]] = {**SAM.columns, "penalty": HParam.PENALTY}
    outputs: ClassVar[tuple[str, ...]] = ("dual", "eps")

    dual: Tensor | None = None
    s: Tensor | None = None
    penalty: Number = 1.0

    def begin(self, rows: Rows, w: Tensor, lr: float, passes: Passes) -> None:
        super().begin(rows, w, lr, passes)
        rows["eps"].zero_()

    def __call__(self, rows: Rows, passes: Passes) -> Tensor:
        losses, g1 = passes()
        dual, s, eps = rows["dual"], rows["s"], rows["eps"].zero_() if rows.may_end else None
        rows.kernels.dual_norm_(rows.sumsq, g1.tensors, dual, s, g1.table, rows.hparams)
        rows.kernels.dual_perturb_([rows.z], rows.w, dual, g1.tensors, s, g1.table, rows.hparams, rows.sumsq, eps=eps)
        rows.is_moved = True
        _, g2 = passes()
        rows.update(g2)
        return losses


@dataclass(frozen=True)
class FedSMOO(Algorithm):
    """FedDyn whose clients agree on one perturbation s by the method of multipliers.

        d = alpha*(g1 - mu_i) - s,   eps = rho * d/||d||,   then mu_i <- mu_i + (eps - s)/alpha     in every local step
        w <- w - lr * (g2 + phi*(h_i + w - w^t) + weight_decay*w),   g2 at w + eps
        s <- rho * r/||r||,   r = mean_i (alpha*mu_i - eps_i),   eps_i the eps of the last step

    and h_i, H and w^{t+1} as in FedDyn. All vectors start at zero, so the first step is a SAM step. Per round and
    client 2 P down (w, s) and 2 P up (displacement, r_i); state: w, s, H, and h_i, mu_i on every client. Two backward
    passes a step.

    Args:
        rho: radius of the perturbation, a number or a schedule; 0 is FedDyn.
        alpha: penalty of the perturbation's sub-problem.
        phi: weight of the proximal term, 1/beta of the paper.
        s_rule: r as above ("paper"), `mean_i mu_i` ("mu_active", the authors' simulator), or minus the mean of the
            mu_i of all clients ("mu_all", their first code; 1 P more on the server).
        dyn: False leaves out the FedDyn half (h_i, H, the proximal term, phi and phi_decay) for ablations.
        phi_decay: factor on phi after each round.
    """

    download_vectors: ClassVar[float] = 2
    upload_vectors: ClassVar[float] = 2

    rho: Scheduled = hparam(0.1, check_scheduled)
    alpha: float = hparam(1.0, number, greater_than=0)
    phi: float = hparam(0.1, number, at_least=0)
    s_rule: str = hparam("paper", choice, RULES)
    dyn: bool = hparam(True, choice, (True, False))
    phi_decay: float = hparam(1.0, number, greater_than=0)

    @property
    def base(self) -> Algorithm:
        """The algorithm to which the perturbation is added."""
        return FedDyn(self.phi, self.phi_decay) if self.dyn else FedAvg()

    @property
    def uses_sums(self) -> bool:  # type: ignore[override]
        """H, or the mean of all mu_i."""
        return self.base.uses_sums or self.s_rule == "mu_all"

    def uses_server_lr(self) -> bool:
        return self.base.uses_server_lr()

    def init_server(self, w0: Tensor) -> State:
        zero = torch.zeros_like(w0)
        return {**self.base.init_server(w0), "s": zero, **({"mu": zero} if self.s_rule == "mu_all" else {})}

    def init_client(self, server: State) -> State:
        return {**self.base.init_client(server), "mu_i": torch.zeros_like(server["w"])}

    def local_step(self, server: State, client: State, round: Round) -> Step:
        base, rho = self.base.local_step(server, client, round), value_at("rho", self.rho, round)
        return DualSAM(q=base.q, prox=base.prox, rho=rho, dual=client["mu_i"], s=server["s"], penalty=self.alpha)

    def finish(self, server: State, client: State, results: ClientResults, round: Round) -> tuple[State, Upload]:
        dual, eps = results.outputs["dual"], results.outputs["eps"]
        state, upload = self.base.finish(server, client, results, round)
        mean, total = dict(upload.mean), dict(upload.sum)
        if self.s_rule == "mu_all":
            total["dmu"] = dual - client["mu_i"]
        else:
            mean["r"] = dual if self.s_rule == "mu_active" else self.alpha * dual - eps
        return {**state, "mu_i": dual}, Upload(mean, total)

    def step_server(self, server: State, aggregate: Aggregate, round: Round) -> State:
        new_state = self.base.step_server(server, aggregate, round)
        if self.s_rule == "mu_all":
            mu = server["mu"].double() + aggregate.sum("dmu") / round.num_clients
            new_state, r = {**new_state, "mu": mu.to(server["mu"].dtype)}, -mu
        else:
            r = aggregate.mean("r")
        s = value_at("rho", self.rho, round) * r / (torch.linalg.vector_norm(r) + NU)
        return {**new_state, "s": s.to(server["s"].dtype)}
