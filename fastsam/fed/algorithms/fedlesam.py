"""FedLESAM, FedLESAM-S and FedLESAM-D: Fan, Hu, Yao, Niu, Zhang, Sugiyama and Wang, "Locally Estimated Global
Perturbations are Better than Local Perturbations for Federated Sharpness-aware Minimization", ICML 2024 (Algorithms 1,
3 and 4)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fastsam.fed.algorithms.base import (
    Aggregate,
    Algorithm,
    ClientResults,
    Round,
    Shifted,
    State,
    Step,
    Upload,
    hparam,
)
from fastsam.fed.algorithms.feddyn import DynamicRegularizer, attraction
from fastsam.fed.algorithms.scaffold import SCAFFOLD
from fastsam.fed.algorithms.schedule import Scheduled, check_scheduled, value_at
from fastsam.fed.common.checks import choice, number


class LocalEstimate(Algorithm):
    """`eps = rho * (w_old - w^t)/||w_old - w^t||` in all steps of the round: known before any gradient. The options are
    described in `FedLESAM`."""

    rho: Scheduled
    initial_perturbation: str
    reference: str

    @property
    def download_vectors(self) -> float:  # type: ignore[override]
        """Number of vectors to a client: the vectors of the method without perturbation, and w^{t-1} if the server
        sends it."""
        return super().download_vectors + (self.reference == "last_round")

    def estimate_step(self, server: State, client: State, round: Round, **constants: Any) -> Step:
        """Return the step with this perturbation and the other constants."""
        old = client.get("w_old_i") if self.reference == "client" else server.get("w_old")
        rho = value_at("rho", self.rho, round)
        if old is None and self.initial_perturbation == "none":
            return Step(**constants)
        e = -server["w"] if old is None else old - server["w"]
        return Shifted(rho=rho, e=e, **constants)

    def finish(self, server: State, client: State, results: ClientResults, round: Round) -> tuple[State, Upload]:
        state, upload = super().finish(server, client, results, round)
        # The model itself, not a copy: clients of one round share it.
        return ({**state, "w_old_i": server["w"]} if self.reference == "client" else state), upload

    def step_server(self, server: State, aggregate: Aggregate, round: Round) -> State:
        new_state = super().step_server(server, aggregate, round)
        return {**new_state, "w_old": server["w"]} if self.reference == "last_round" else new_state


@dataclass(frozen=True)
class FedLESAM(LocalEstimate):
    """SAM steps at the price of SGD: the perturbation is where the global model came from.

        eps = rho * (w_old_i - w^t)/||w_old_i - w^t||      once per round
        w <- w - lr * (g + weight_decay*w),  g the batch gradient at w + eps
        w_old_i <- w^t after the round, in clients that took part;  the server's step is FedAvg's

    The released optimizer shifts every tensor by a constant instead of along this direction; this is the paper's rule.
    Per round and client 1 P down and 1 P up; state: w, and w_old_i on every client (clients of one round share it). One
    back-propagation a step.

    Args:
        rho: a number or a schedule.
        initial_perturbation: for a client without w_old_i, "origin" takes w_old_i = 0 (the paper), "none" does not
            perturb (the authors' code, in round 0).
        reference: "client" as above (the paper), or "last_round", w^{t-1} for all clients (the authors' code; 1 P more
            down).
    """

    rho: Scheduled = hparam(0.01, check_scheduled)
    initial_perturbation: str = hparam("origin", choice, ("origin", "none"))
    reference: str = hparam("client", choice, ("client", "last_round"))

    def local_step(self, server: State, client: State, round: Round) -> Step:
        return self.estimate_step(server, client, round)


@dataclass(frozen=True)
class FedLESAM_D(LocalEstimate, DynamicRegularizer):
    """FedLESAM's perturbation in FedDyn.

        w <- w - lr * (g + phi*(h_i + w - w^t) + weight_decay*w),  g the batch gradient at w + eps, eps as in FedLESAM
        h_i, H and w^{t+1}: as in FedDyn;  w_old_i <- w^t

    FedDyn and the paper's code have these equations. The paper's listing has the opposite sign of the dual, leaves it
    out of the server's step, and divides by the active clients. The run's server_lr must be 1, as in FedDyn. Per round
    and client 1 P down and 1 P up; state: w, H, and h_i, w_old_i on every client. One backward pass a step.

    Args:
        rho: see `FedLESAM`; 0 is FedDyn.
        phi: weight of the proximal term, the paper's 1/beta.
        initial_perturbation, reference: see `FedLESAM`.
        phi_decay: factor on phi after each round.
    """

    rho: Scheduled = hparam(0.1, check_scheduled)
    phi: float = hparam(0.1, number, at_least=0)
    initial_perturbation: str = hparam("origin", choice, ("origin", "none"))
    reference: str = hparam("client", choice, ("client", "last_round"))
    phi_decay: float = hparam(1.0, number, greater_than=0)

    def local_step(self, server: State, client: State, round: Round) -> Step:
        phi = self.phi_of(round)
        return self.estimate_step(server, client, round, q=attraction(phi, server, client), prox=phi)


@dataclass(frozen=True)
class FedLESAM_S(LocalEstimate, SCAFFOLD):  # type: ignore[override]
    """FedLESAM's perturbation in SCAFFOLD.

        w <- w - lr * (g + control_scale*(c - c_i) + weight_decay*w),  g the batch gradient at w + eps
        eps as in FedLESAM;  c_i, c as in SCAFFOLD;  w_old_i <- w^t

    The paper's listing has `- (c - c_i)` with gradient-signed c, and a mean of the c_i over the active clients in place
    of the sum of their changes over N. Its code and SCAFFOLD have the equations above. Per round and client 2 P down
    and 2 P up; state: w, c, and c_i, w_old_i on every client. One backward pass a step.

    Args:
        rho: see `FedLESAM`; 0 is SCAFFOLD.
        initial_perturbation, reference: see `FedLESAM`.
        control_scale: weight of the control variates, 1 in the paper and 0.1 in its code.
    """

    rho: Scheduled = hparam(0.1, check_scheduled)
    initial_perturbation: str = hparam("origin", choice, ("origin", "none"))
    reference: str = hparam("client", choice, ("client", "last_round"))
    control_scale: float = hparam(1.0, number, at_least=0)

    def local_step(self, server: State, client: State, round: Round) -> Step:
        return self.estimate_step(server, client, round, q=self.control_scale * self.correction(server, client))
