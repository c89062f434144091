"""FusedSAM in an ordinary training loop: three lines, and one context manager where the model has BatchNorm.

Run it here:  python examples/fused_sam.py
"""

from __future__ import annotations

import torch
from torch import nn

import fastsam
from fastsam import fed


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Linear(32, 10),
    )  # fmt: skip


def train(model: nn.Module, x: torch.Tensor, y: torch.Tensor, epochs: int = 8, batch_size: int = 64) -> None:
    criterion = nn.CrossEntropyLoss()
    optimizer = fastsam.FusedSAM(
        model.parameters(), torch.optim.SGD, rho=0.05, lr=0.05, momentum=0.9, weight_decay=5e-4
    )
    for _ in range(epochs):
        for batch in torch.randperm(len(x)).split(batch_size):
            criterion(model(x[batch]), y[batch]).backward()
            optimizer.first_step(zero_grad=True)  # to the worst point within rho
            with fastsam.frozen_batchnorm_stats(model):  # which shall not enter the running statistics
                criterion(model(x[batch]), y[batch]).backward()
            optimizer.second_step(zero_grad=True)  # back, and a step with the gradient found there


def main() -> None:
    torch.manual_seed(0)
    data = fed.digits(clients=1, split="iid")  # one client: the whole training set
    model = network()
    train(model, *data[0])
    x, y = data.test
    model.eval()
    with torch.no_grad():
        accuracy = (model(x).argmax(1) == y).float().mean()
    print(f"test accuracy {accuracy:.3f}")


if __name__ == "__main__":
    main()
