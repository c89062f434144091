"""One workload for all contenders: 100 clients with samples in 10 classes, 20 clients a round.

Clients have 8 to 120 samples, or the digits of a Dirichlet split, or 64 samples each. One local epoch in a random
order, with batches of 16 and lr 0.1, without evaluation.

The module imports only numpy and torch, because the other simulators run in separate environments without fastsam.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

CLASSES, SAMPLES, BATCH, LR, RHO = 10, 64, 16, 0.1, 0.05
SHAPES = {"mlp": (64,), "gelu": (64,), "cnn": (1, 28, 28)}
FEWEST, MOST = 8, 120  # samples of a client with `sizes="unequal"`; the mean is 64, as for equal clients
DIGITS = Path("build/bench/digits.npz")  # written by `write_digits`, because other environments lack the data set


def mlp(width: int = 32) -> nn.Module:
    """Return the MLP 64-width-10."""
    return nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, CLASSES))


def gelu() -> nn.Module:
    """Return the MLP 64-32-10 with LayerNorm and GELU."""
    return nn.Sequential(nn.Linear(64, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, CLASSES))


def cnn() -> nn.Module:
    """Return a CNN for 28x28x1; 225,034 parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(1600, 128), nn.ReLU(), nn.Linear(128, CLASSES),
    )  # fmt: skip


@dataclass(frozen=True)
class Workload:
    """A federated workload. Only our executors use `slots`, `epochs`, `lr` and `options` (pairs for `fed.run`).

    `model` is "cnn", "gelu", "mlp" or "mlp:WIDTH"; `cohort` is the number of clients in a round. `sizes` is
    "equal", "unequal" or "digits" (of an MLP). The other simulators use the CPU as `device`.
    """

    model: str
    algorithm: str = "fedavg"
    clients: int = 100
    cohort: int = 20
    sizes: str = "equal"
    device: str = "cpu"
    slots: int | None = None
    epochs: int = 1
    lr: float = LR
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        return SHAPES[self.model.split(":")[0]]

    def make_model(self) -> nn.Module:
        """Return the model with the initial weights that all contenders share."""
        torch.manual_seed(0)
        name, _, width = self.model.partition(":")
        model = {"cnn": cnn, "gelu": gelu}[name]() if name != "mlp" else mlp(int(width or 32))
        return model.to(self.device)

    def data(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return per client float32 inputs and int64 labels: a prototype per class, and noise, or digits."""
        if self.sizes == "digits":
            with np.load(DIGITS) as file:
                return [(file[f"x{i}"], file[f"y{i}"]) for i in range(self.clients)]
        random = np.random.default_rng(0)
        prototypes = random.normal(size=(CLASSES, *self.shape))
        clients = []
        for _ in range(self.clients):
            n = int(random.integers(FEWEST, MOST + 1)) if self.sizes == "unequal" else SAMPLES
            y = random.integers(CLASSES, size=n)
            x = 0.5 * prototypes[y] + random.normal(size=(n, *self.shape))
            clients.append((x.astype(np.float32), y))
        return clients

    def tensors(self) -> list[tuple[Tensor, Tensor]]:
        return [(torch.from_numpy(x).to(self.device), torch.from_numpy(y).to(self.device)) for x, y in self.data()]

    @torch.no_grad()
    def loss_of(self, model: nn.Module) -> float:
        """Return the cross-entropy over the data of 100 clients. The correctness check compares it."""
        device = next(model.parameters()).device
        x, y = (torch.cat(part[:100]).to(device) for part in zip(*self.tensors()))
        return float(nn.functional.cross_entropy(model.eval()(x), y))
