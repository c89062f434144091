"""FedAvg: McMahan, Moore, Ramage, Hampson and Agüera y Arcas, "Communication-Efficient Learning of Deep Networks from
Decentralized Data", AISTATS 2017 (Algorithm 1)."""

from __future__ import annotations

from dataclasses import dataclass

from fastsam.fed.algorithms.base import Algorithm


@dataclass(frozen=True)
class FedAvg(Algorithm):
    """Local SGD, then the mean of the displacements.

        w <- w - lr * (g + weight_decay*w)              local, K steps from w^t
        w^{t+1} = w^t + server_lr * mean_i (w_i - w^t)

    Per round and client 1 P down and 1 P up; state: w. One backward pass a step.
    """
