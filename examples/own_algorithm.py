"""An algorithm of your own: a frozen dataclass of hyper-parameters that overrides what differs from federated averaging.

This one is FedProx (Li et al., "Federated Optimization in Heterogeneous Networks", MLSys 2020) with an optional SAM
perturbation: each local step also pulls towards the global model w^t,

    w <- w - lr * (g + mu*(w - w^t)),    g the gradient at w (rho = 0) or at w + rho * g1/||g1||.

Run it here:                 python examples/own_algorithm.py
or like a built-in one:      fastsam run examples/digits.toml --algorithm examples/own_algorithm.py:FedProx --mu 0.1
or beside built-in ones:     fastsam compare examples/digits.toml --algorithms fedavg,examples/own_algorithm.py:FedProx
"""

from __future__ import annotations

from dataclasses import dataclass

from fastsam import fed
from fastsam.fed import Algorithm, Direction, LocalStep, Round, State, models


@dataclass(frozen=True)
class FedProx(Algorithm):
    """mu: strength of the pull, >= 0; 0 is FedAvg. rho: radius of the perturbation; 0 is none."""

    mu: float = 0.1
    rho: float = 0.0

    def __post_init__(self) -> None:
        if not self.mu >= 0:
            raise ValueError(f"mu must be >= 0, got {self.mu!r}")

    def local_step(self, server: State, client: State, round: Round) -> LocalStep:
        """The pull in two parts: `phi*w` is in every step, its constant half `-phi*w^t` goes into q."""
        direction = Direction.GRADIENT if self.rho else Direction.NONE
        return LocalStep(direction, rho=self.rho, q=-self.mu * server["w"], phi=self.mu)


def main() -> None:
    data = fed.digits(clients=50, alpha=0.3)
    model = models.build("cnn", data.in_shape, data.classes, seed=0)
    result = fed.run(model, data, FedProx(mu=0.1), rounds=20, batch_size=16, lr=0.1, participation=0.2, seed=0)
    print(f"FedProx after {len(result.history)} rounds: {100 * result.summary()['accuracy_final']:.1f} % test accuracy")


if __name__ == "__main__":
    main()
