"""An algorithm of your own: a frozen dataclass of hyper-parameters that overrides what differs from federated
averaging.

This one is FedAvgM (Hsu, Qi and Brown, "Measuring the Effects of Non-Identical Data Distribution for Federated Visual
Classification", 2019), momentum on the server, with an optional SAM perturbation on the clients. docs/own_algorithm.md
explains it line by line.

Run it here, like a built-in one, or next to built-in ones:

    python examples/own_algorithm.py
    fastsam run examples/digits.toml --algorithm examples/own_algorithm.py:FedAvgM --beta 0.5
    fastsam compare examples/digits.toml --algorithms fedavg,examples/own_algorithm.py:FedAvgM
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fastsam import fed
from fastsam.fed import SAM, Aggregate, Algorithm, Round, State, Step, apply_update, models


@dataclass(frozen=True)
class FedAvgM(Algorithm):
    """Federated averaging with momentum on the server.

    Args:
        beta: share of the last direction that is kept, in [0, 1); 0 is FedAvg.
        rho: radius of the perturbation; 0 for no perturbation.
    """

    beta: float = 0.9
    rho: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.beta < 1:
            raise ValueError(f"beta must lie in [0, 1), got {self.beta!r}")

    def init_server(self, w0: Tensor) -> State:
        return {"w": w0, "m": torch.zeros_like(w0)}

    def local_step(self, server: State, client: State, round: Round) -> Step:
        return SAM(rho=self.rho) if self.rho else Step()

    def step_server(self, server: State, aggregate: Aggregate, round: Round) -> State:
        m = self.beta * server["m"].double() + aggregate.mean("delta")
        return {"w": apply_update(server["w"], round.server_lr * m), "m": m.to(server["m"].dtype)}


def main() -> None:
    data = fed.digits(clients=50, alpha=0.3)
    model = models.build("cnn", data.in_shape, data.classes, seed=0)
    result = fed.run(model, data, FedAvgM(beta=0.5), rounds=20, batch_size=16, lr=0.1, participation=0.2, seed=0)
    print(f"FedAvgM after {len(result.history)} rounds: {100 * result.summary()['accuracy_final']:.1f} % test accuracy")


if __name__ == "__main__":
    main()
