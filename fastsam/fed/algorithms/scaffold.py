"""SCAFFOLD: Karimireddy, Kale, Mohri, Reddi, Stich and Suresh, "SCAFFOLD: Stochastic Controlled Averaging for Federated
Learning", ICML 2020 (Algorithm 1, option II)."""

from __future__ import annotations

from dataclasses import dataclass

from fastsam.fed.algorithms.base import LocalUpdate, Round, State
from fastsam.fed.algorithms.control import ControlVariates


@dataclass(frozen=True)
class SCAFFOLD(ControlVariates):
    """Local SGD with control variates against the drift of the clients.

        w <- w - lr * (g + c - c_i + weight_decay*w)
        c_i <- c_i - c - (w_i - w^t)/(lr_t*K_i)          K_i the true number of local steps, c as received
        c <- c + 1/N * sum_i (change of c_i);  the server's step on w is FedAvg's

    c = c_i = 0 at the start, so round 0 is FedAvg. N are all clients, not the active ones: c is always the mean of all
    c_i. Per round and client 2 P down and 2 P up; state: w, c, and c_i on every client. One backward pass a step.
    """

    def local_update(self, server: State, client: State, round: Round) -> LocalUpdate:
        return LocalUpdate(gradient_offset=self.correction(server, client))
