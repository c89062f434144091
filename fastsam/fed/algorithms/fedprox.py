"""FedProx: Li, Sahu, Zaheer, Sanjabi, Talwalkar and Smith, "Federated Optimization in Heterogeneous Networks", MLSys
2020 (Algorithm 2)."""

from __future__ import annotations

from dataclasses import dataclass

from fastsam.fed.algorithms.base import Algorithm, Round, State, Step, hparam
from fastsam.fed.common.checks import number


@dataclass(frozen=True)
class FedProx(Algorithm):
    """Local SGD with a pull towards the received model.

        w <- w - lr * (g + phi*(w - w^t) + weight_decay*w);    the server's step is FedAvg's

    `phi*w - phi*w^t` are two fields of `Step`, whose sum the update kernel (`csrc/kernel_math.h`) adds to g.

    Per round and client 1 P down and 1 P up; state: w. One backward pass a step.

    Args:
        phi: weight of the proximal term, the paper's mu; 0 is FedAvg.
    """

    phi: float = hparam(0.01, number, at_least=0)

    def local_step(self, server: State, client: State, round: Round) -> Step:
        return Step(q=-self.phi * server["w"], prox=self.phi)
