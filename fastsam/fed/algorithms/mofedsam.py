"""MoFedSAM: Qu, Li, Duan, Liu, Tang and Lu, "Generalized Federated Learning via Sharpness Aware Minimization", ICML 2022 (eq. 6)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..checks import choice, number
from .base import Algorithm, Direction, LocalStep, Round, RowEnd, State, Sums, Upload


@dataclass(frozen=True)
class MoFedSAM(Algorithm):
    """FedSAM whose local steps follow the last round's global direction D as well.

        v = beta*g2 + (1 - beta)*D^t,  g2 as in FedSAM;  w <- w - lr * (v + weight_decay*w)
        D^{t+1} = -mean_i (w_i - w^t)/(lr_t*K_i),  D^0 = 0;  the server's step is FedAvg's

    beta = 1 is FedSAM; in round 0 a step is beta times FedSAM's. The paper writes the server's step as `w - server_lr*D`, which is the
    plain mean only where `lr*K = 1`; authors' and simulators' code takes the plain mean, and so do we.

    momentum_K: K_i counts a client's true local "steps", or its local "epochs": with the paper's 10 epochs and lr 0.1 the latter makes
    its literal formula the plain mean, and D several times larger.
    Per round and client 2 P down (w, D) and 1 P up; state: w, D. Two back-propagations a step.
    """

    down: ClassVar[float] = 2
    server_vectors: ClassVar[float] = 2

    rho: float = 0.05
    beta: float = 0.1
    momentum_K: str = "steps"

    def __post_init__(self) -> None:
        number("rho", self.rho, at_least=0)
        number("beta", self.beta, at_least=0, at_most=1)
        choice("momentum_K", self.momentum_K, ("steps", "epochs"))

    def init_server(self, w0: Tensor) -> State:
        return {"w": w0, "D": torch.zeros_like(w0)}

    def local_step(self, server: State, client: State, round: Round) -> LocalStep:
        return LocalStep(Direction.GRADIENT, rho=self.rho, a=self.beta, q=(1 - self.beta) * server["D"])

    def close_client(self, server: State, client: State, end: RowEnd, round: Round) -> tuple[State, Upload]:
        # The server makes both vectors from the one that it receives: it knows lr, and K_i comes as a number.
        K = end.steps if self.momentum_K == "steps" else round.local_epochs
        return client, Upload(mean={"delta": end.displacement, "D": end.displacement / (-round.lr * K)})

    def step_server(self, server: State, sums: Sums, round: Round) -> State:
        return {**super().step_server(server, sums, round), "D": sums.mean("D").to(server["D"].dtype)}
