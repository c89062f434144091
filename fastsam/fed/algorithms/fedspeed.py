"""FedSpeed: Sun, Shen, Huang, Ding and Tao, "FedSpeed: Larger Local Interval, Less Communication Round, and Higher
Generalization Accuracy", ICLR 2023 (Algorithm 1)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fastsam.fed.algorithms.base import SAM, Algorithm, ClientResults, Round, State, Step, Upload, hparam
from fastsam.fed.algorithms.feddyn import attraction
from fastsam.fed.algorithms.schedule import Scheduled, check_scheduled, value_at
from fastsam.fed.common.checks import number


@dataclass(frozen=True)
class FedSpeed(Algorithm):
    """Mixed gradients, a proximal term, and a correction of its bias that the client adds to its upload.

        v = (1 - alpha)*g1 + alpha*g2,   g2 as in FedSAM
        w <- w - lr * (v + phi*(h_i + w - w^t) + weight_decay*w)       h_i = -ghat_i/phi, phi = 1/lambda of the paper
        h_i <- h_i + (w_i - w^t);    the client sends (w_i - w^t) + h_i,  the server's step is FedAvg's

    FedDyn's server has the mean of h_i over all clients, this server over the active clients (the authors' later
    simulator uses all). Per round and client 1 P down and 1 P up; state: w, and h_i on every client. Two backward
    passes a step.

    Args:
        rho: radius of the perturbation, a number or a schedule.
        alpha: weight of g2; 1, as in the authors' later simulator, gives plain SAM gradients.
        phi: weight of the proximal term.
    """

    rho: Scheduled = hparam(0.1, check_scheduled)
    alpha: float = hparam(1.0, number, at_least=0, at_most=1)
    phi: float = hparam(0.1, number, at_least=0)

    def init_client(self, server: State) -> State:
        return {"h_i": torch.zeros_like(server["w"])}

    def local_step(self, server: State, client: State, round: Round) -> Step:
        rho, q = value_at("rho", self.rho, round), attraction(self.phi, server, client)
        return SAM(rho=rho, a=self.alpha, b=1 - self.alpha, q=q, prox=self.phi)

    def finish(self, server: State, client: State, results: ClientResults, round: Round) -> tuple[State, Upload]:
        h_i = client["h_i"] + results.delta
        return {"h_i": h_i}, Upload(mean={"delta": results.delta + h_i})
