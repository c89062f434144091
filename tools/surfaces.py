"""Computes the loss surfaces of docs/pictures/surfaces-*.svg: python tools/surfaces.py, half a minute.

An MLP is trained on the digits with SGD and with SAM, from the same weights and batches. Around both ends the training
loss is taken on a grid. The grids go into docs/pictures/surfaces.json.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fastsam import FusedSAM, fed
from fastsam.lab.report.surface import loss_surface

FILE = Path(__file__).resolve().parents[1] / "docs" / "pictures" / "surfaces.json"
POINTS, EPOCHS, RHO, LR, MOMENTUM, BATCH = 31, 30, 0.2, 0.05, 0.9, 64


def train(x: Tensor, y: Tensor, rho: float) -> nn.Module:
    """Return an MLP trained with SAM, or with SGD if `rho` is 0."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    opt = FusedSAM(model.parameters(), torch.optim.SGD, rho=rho, lr=LR, momentum=MOMENTUM, backend="reference")
    for _ in range(EPOCHS):
        for batch in torch.randperm(len(x)).split(BATCH):
            opt.step(lambda batch=batch: cross_entropy(model(x[batch]), y[batch]).backward())
    return model


def grid(model: nn.Module, x: Tensor, y: Tensor) -> list[list[float]]:
    """Return the training loss around the weights of `model`."""
    values = loss_surface(model, [(x, y)], cross_entropy, POINTS)
    return [[float(f"{value:.3g}") for value in row] for row in values.tolist()]


def main() -> None:
    """Train, compute and write the file."""
    torch.set_num_threads(1)
    (x, y) = fed.digits(clients=1, split="iid")[0]
    grids = {name: grid(train(x, y, rho), x, y) for name, rho in (("SGD", 0.0), (f"SAM, rho = {RHO}", RHO))}
    FILE.write_text(json.dumps(grids) + "\n")


if __name__ == "__main__":
    main()
