"""The locally estimated perturbation, shared by FedLESAM, FedLESAM-S and FedLESAM-D: Fan, Hu, Yao, Niu, Zhang, Sugiyama
and Wang, "Locally Estimated Global Perturbations are Better than Local Perturbations for Federated Sharpness-aware
Minimization", ICML 2024 (Algorithm 1)."""

from __future__ import annotations

from typing import Any

from fastsam.fed.algorithms.base import (
    Aggregate,
    Algorithm,
    ClientResults,
    Direction,
    LocalUpdate,
    Round,
    State,
    Upload,
)
from fastsam.fed.algorithms.schedule import Scheduled, check_scheduled, value_at
from fastsam.fed.common.checks import choice


class LocalEstimate(Algorithm):
    """`eps = rho * (w_old - w^t)/||w_old - w^t||` in all steps of the round: known before any gradient.

    Args:
        initial_perturbation: for a client without w_old, "origin" takes the paper's w_old = 0, so eps points from w^t
            to the origin; "none" does not perturb, as the authors' code in round 0.
        reference: "client" takes the model that this client received last as w_old (the paper); "last_round" takes
            w^{t-1} for all clients (the authors' code), and the server sends it too, 1 P more down.
    """

    rho: Scheduled
    initial_perturbation: str
    reference: str

    @property
    def download_vectors(self) -> float:  # type: ignore[override]
        """Number of vectors to a client: the vectors of the method without perturbation, and w^{t-1} if the server
        sends it."""
        return super().download_vectors + (self.reference == "last_round")

    @property
    def server_vectors(self) -> float:  # type: ignore[override]
        """Vectors that the server keeps."""
        return super().server_vectors + (self.reference == "last_round")

    @property
    def client_vectors(self) -> float:  # type: ignore[override]
        """Vectors that a client keeps."""
        return super().client_vectors + (self.reference == "client")

    def check_estimate(self) -> None:
        """Raises ValueError for options outside their range."""
        check_scheduled("rho", self.rho)
        choice("initial_perturbation", self.initial_perturbation, ("origin", "none"))
        choice("reference", self.reference, ("client", "last_round"))

    def estimate_step(self, server: State, client: State, round: Round, **constants: Any) -> LocalUpdate:
        """The local step with this perturbation and the other constants given."""
        old = client.get("w_old_i") if self.reference == "client" else server.get("w_old")
        rho = value_at("rho", self.rho, round)
        if old is None and self.initial_perturbation == "none":
            return LocalUpdate(**constants)
        e = -server["w"] if old is None else old - server["w"]
        return LocalUpdate(Direction.CONSTANT, rho=rho, direction_vector=e, **constants)

    def finish_client(self, server: State, client: State, results: ClientResults, round: Round) -> tuple[State, Upload]:
        state, upload = super().finish_client(server, client, results, round)
        # The model itself, not a copy: clients of one round share it.
        return ({**state, "w_old_i": server["w"]} if self.reference == "client" else state), upload

    def step_server(self, server: State, aggregate: Aggregate, round: Round) -> State:
        after = super().step_server(server, aggregate, round)
        return {**after, "w_old": server["w"]} if self.reference == "last_round" else after
