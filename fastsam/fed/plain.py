"""FedAvg and FedSAM in plain torch, without kernels and without options.

`fed.run` computes the same numbers, and a test compares them. This module is there to be read: `fed.run` does not use
it.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fastsam.fed.common import seeds

NU = 1e-7  # added to the norm of the gradient, as in the papers' simulators


def train(
    model: nn.Module, clients: Sequence[tuple[Tensor, Tensor]], rho: float,
    *, rounds: int, cohort: int, local_epochs: int, batch_size: int, lr: float, seed: int = 0,
) -> nn.Module:  # fmt: skip
    """Return a copy of `model` trained with FedSAM of radius `rho`, which is FedAvg if `rho` is 0."""
    model = copy.deepcopy(model).train()
    w = [p.detach().clone() for p in model.parameters()]
    for t in range(rounds):
        ids = torch.randperm(len(clients), generator=seeds.generator(seed, "sample", t))[:cohort]
        sums = [torch.zeros_like(p, dtype=torch.float64) for p in w]
        for i in ids.tolist():
            x, y = clients[i]
            batches: list[tuple[Tensor, Tensor]] = []
            for epoch in range(local_epochs):
                order = seeds.permutations([i], [len(y)], seed, "shuffle", t, epoch)[0]
                batches += zip(x[order].split(batch_size), y[order].split(batch_size), strict=True)
            for total, delta in zip(sums, train_client(model, w, batches, rho, lr), strict=True):
                total += delta
        w = [(p + total / cohort).to(p.dtype) for p, total in zip(w, sums, strict=True)]
    return set_weights(model, w)


def train_client(
    model: nn.Module, w: Sequence[Tensor], batches: Sequence[tuple[Tensor, Tensor]], rho: float, lr: float
) -> list[Tensor]:
    """Take a step of SAM (of SGD if `rho` is 0) on every batch, and return the change of the weights `w`."""
    local = list(w)
    for x, y in batches:
        g = gradient(model, local, x, y)
        if rho:
            norm = torch.stack([part.square().sum(dtype=torch.float64) for part in g]).sum().sqrt()
            scale = rho / (norm.item() + NU)
            g = gradient(model, [p + scale * part for p, part in zip(local, g, strict=True)], x, y)
        local = [p - lr * part for p, part in zip(local, g, strict=True)]
    return [p - start for p, start in zip(local, w, strict=True)]


def gradient(model: nn.Module, weights: Sequence[Tensor], x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    """Return the gradient of the mean cross-entropy of a batch at `weights`."""
    return torch.autograd.grad(cross_entropy(set_weights(model, weights)(x), y), list(model.parameters()))


@torch.no_grad()
def set_weights(model: nn.Module, weights: Sequence[Tensor]) -> nn.Module:
    """Copy `weights` into the parameters of `model` and return it."""
    for p, value in zip(model.parameters(), weights, strict=True):
        p.copy_(value)
    return model
