"""FedSMOO: Sun, Shen, Chen, Ding and Tao, "Dynamic Regularized Sharpness Aware Minimization in Federated Learning:
Approaching Global Consistency and Smooth Landscape", ICML 2023 (Algorithm 1)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from fastsam.fed.algorithms.base import (
    Aggregate,
    Algorithm,
    ClientResults,
    Direction,
    LocalUpdate,
    Round,
    State,
    Upload,
    hparam,
)
from fastsam.fed.algorithms.fedavg import FedAvg
from fastsam.fed.algorithms.feddyn import FedDyn
from fastsam.fed.algorithms.schedule import Scheduled, check_scheduled, value_at
from fastsam.fed.common.checks import choice, number
from fastsam.fed.update.local_update import NU

RULES = ("paper", "mu_active", "mu_all")


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
    backward_passes: ClassVar[int] = 2

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
    def server_vectors(self) -> float:  # type: ignore[override]
        """s, and the mean of all mu_i where the rule is made of it."""
        return self.base.server_vectors + 1 + (self.s_rule == "mu_all")

    @property
    def client_vectors(self) -> float:  # type: ignore[override]
        """mu_i."""
        return self.base.client_vectors + 1

    @property
    def uses_sums(self) -> bool:  # type: ignore[override]
        """H, or the mean of all mu_i."""
        return self.base.uses_sums or self.s_rule == "mu_all"

    @property
    def working_vectors(self) -> float:  # type: ignore[override]
        """The perturbed copy, mu_i and s."""
        return self.base.working_vectors + 3

    def uses_server_lr(self) -> bool:
        return self.base.uses_server_lr()

    def init_server(self, w0: Tensor) -> State:
        zero = torch.zeros_like(w0)
        return {**self.base.init_server(w0), "s": zero, **({"mu": zero} if self.s_rule == "mu_all" else {})}

    def init_client(self, server: State) -> State:
        return {**self.base.init_client(server), "mu_i": torch.zeros_like(server["w"])}

    def local_update(self, server: State, client: State, round: Round) -> LocalUpdate:
        update = self.base.local_update(server, client, round)
        assert isinstance(update, LocalUpdate)
        return replace(
            update,
            direction=Direction.GRADIENT_MINUS_DUAL,
            rho=value_at("rho", self.rho, round),
            dual=client["mu_i"],
            server_perturbation=server["s"],
            penalty=self.alpha,
        )

    def finish_client(self, server: State, client: State, results: ClientResults, round: Round) -> tuple[State, Upload]:
        if results.dual is None or results.eps is None:
            raise ValueError("FedSMOO needs the dual and the perturbation of every client; this executor returned none")
        state, upload = self.base.finish_client(server, client, results, round)
        mean, total = dict(upload.mean), dict(upload.sum)
        if self.s_rule == "mu_all":
            total["dmu"] = results.dual - client["mu_i"]
        else:
            mean["r"] = results.dual if self.s_rule == "mu_active" else self.alpha * results.dual - results.eps
        return {**state, "mu_i": results.dual}, Upload(mean, total)

    def step_server(self, server: State, aggregate: Aggregate, round: Round) -> State:
        new_state = self.base.step_server(server, aggregate, round)
        if self.s_rule == "mu_all":
            mu = server["mu"].double() + aggregate.sum("dmu") / round.num_clients
            new_state, r = {**new_state, "mu": mu.to(server["mu"].dtype)}, -mu
        else:
            r = aggregate.mean("r")
        s = value_at("rho", self.rho, round) * r / (torch.linalg.vector_norm(r) + NU)
        return {**new_state, "s": s.to(server["s"].dtype)}
