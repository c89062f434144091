"""FedRobust: Reisizadeh, Farnia, Pedarsani and Jadbabaie, "Robust Federated Learning: The Case of Affine Distribution
Shifts", NeurIPS 2020 (FLRA objective; gradient descent-ascent)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fastsam.fed.algorithms.base import Algorithm, ClientResults, LocalUpdate, Round, State, Upload
from fastsam.fed.common.checks import choice, integer, number
from fastsam.fed.step.input_map import FORMS, InputMap


@dataclass(frozen=True)
class FedRobust(Algorithm):
    """Local SGD against an affine map of the inputs that every client trains by ascent.

        f_i(w, Lam, delta) = loss(model_w(Lam*x + delta), y) - lam*||Lam - I||^2 - lam*||delta||^2
        w <- w - lr * (grad_w f_i + weight_decay*w)
        Lam_i <- Lam_i + eta_2*grad_Lam f_i,  delta_i <- delta_i + eta_2*grad_delta f_i

    All gradients of a step are taken at the same point. The maps start at the identity and stay with their clients; the
    server's step is FedAvg's. Our choice, for want of published settings: lam = 1; eta_2 = None, the local learning
    rate of the round; the map's `form`, "full" up to 1024 inputs, else "channel" ("diag" is the third); ascent_steps,
    steps of the map per step of w, of which the last shares its back-propagation. radius = (e1, e2) takes the
    constraints ||Lam - I|| <= e1, ||delta|| <= e2 in place of the penalty lam. Per round and client 1 P down and 1 P
    up; state: w, and Lam, delta on every client (d^2 + d numbers for d inputs, not P). One back-propagation a step and
    one more for every further ascent step.
    """

    lam: float = 1.0
    eta_2: float | None = None
    ascent_steps: int = 1
    form: str | None = None
    radius: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        number("lam", self.lam, at_least=0)
        if self.eta_2 is not None:
            number("eta_2 (None for the local learning rate)", self.eta_2, at_least=0)
        integer("ascent_steps", self.ascent_steps, at_least=1)
        choice("form", self.form, (*FORMS, None))
        if self.radius is not None:
            object.__setattr__(self, "radius", _pair(self.radius))

    def local_update(self, server: State, client: State, round: Round) -> LocalUpdate:
        eta_2 = round.lr if self.eta_2 is None else self.eta_2
        fixed = InputMap(self.form, self.lam, eta_2, self.ascent_steps, self.radius)
        return LocalUpdate(input_map=replace(fixed, Lam=client.get("Lam"), delta=client.get("delta")))

    def finish_client(self, server: State, client: State, results: ClientResults, round: Round) -> tuple[State, Upload]:
        state, upload = super().finish_client(server, client, results, round)
        if results.input_map is None or results.input_map.Lam is None or results.input_map.delta is None:
            raise ValueError("FedRobust needs the trained input map of every client; this executor returned none")
        return {**state, "Lam": results.input_map.Lam, "delta": results.input_map.delta}, upload


def _pair(radius: object) -> tuple[float, float]:
    """(e1, e2), of a list too (JSON and TOML have no tuples). Raises ValueError for anything else."""
    if isinstance(radius, (str, bytes)) or not isinstance(radius, Sequence) or len(radius) != 2:
        raise ValueError(f"radius must be two numbers [e1, e2], the largest ||Lam - I|| and ||delta||, got {radius!r}")
    return number("radius[0]", radius[0], at_least=0), number("radius[1]", radius[1], at_least=0)
