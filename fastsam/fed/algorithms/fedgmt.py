"""FedGMT: Li, Liu, Cui, Hu and Li, "One Arrow, Two Hawks: Sharpness-aware Minimization for Federated Learning via
Global Model Trajectory", ICML 2025; https://github.com/harrylee999/FL-SAM."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fastsam.fed.algorithms.base import Aggregate, Round, State, Step, hparam
from fastsam.fed.algorithms.distillation import Taught, divergence
from fastsam.fed.algorithms.feddyn import DynamicRegularizer
from fastsam.fed.common.checks import number


@dataclass(frozen=True)
class FedGMT(DynamicRegularizer):
    """The clients' outputs stay close to the outputs of a moving average e of the global model. The difference of the
    two losses approximates the global sharpness.

        f_i = loss(w) + gamma * tau^2 * KL(softmax(out_e/tau) || softmax(out_w/tau))
        w <- w - lr * (grad f_i + phi*h_i + weight_decay*w)
        h_i <- h_i + Delta_i,   H <- H + 1/N * sum_i Delta_i;   w^{t+1} = w^t + mean_i Delta_i + H
        e^{t+1} = alpha*e^t + (1 - alpha)*w^{t+1},   e^0 = w^0

    phi is the paper's 1/beta, h_i = -beta*u_i. There is no proximal term. H is the mean of h_i over all clients, and
    H and the defaults agree with the authors' code. A published transcription of the paper has the mean over the
    active clients. The server has no learning rate, so a run's server_lr must be 1.
    Per round and client 2 P down (w, e) and 1 P up; state: w, e, H, and h_i on every client. One backward pass and a
    further forward pass a step.

    Args:
        gamma: weight of the distillation term.
        alpha: weight of the old average in e.
        tau: temperature.
        phi: weight of the dual term.
        phi_decay: factor of phi from round to round.
    """

    download_vectors: ClassVar[float] = 2

    gamma: float = hparam(1.0, number, at_least=0)
    alpha: float = hparam(0.95, number, at_least=0, at_most=1)
    tau: float = hparam(3.0, number, greater_than=0)
    phi: float = hparam(0.1, number, at_least=0)
    phi_decay: float = hparam(1.0, number, greater_than=0)

    def init_server(self, w0: Tensor) -> State:
        return {**super().init_server(w0), "e": w0}

    def local_step(self, server: State, client: State, round: Round) -> Step:
        return Taught(q=self.phi_of(round) * client["h_i"], teacher=server["e"], term=self.distillation)

    def distillation(self, teacher_outputs: Tensor, y: Tensor, outputs: Tensor) -> Tensor:
        """Return the distillation term."""
        return self.gamma * divergence(outputs, teacher_outputs, self.tau)

    def step_server(self, server: State, aggregate: Aggregate, round: Round) -> State:
        new_state = super().step_server(server, aggregate, round)
        e = self.alpha * server["e"].double() + (1 - self.alpha) * new_state["w"].double()
        return {**new_state, "e": e.to(server["e"].dtype)}
