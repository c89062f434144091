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

Samples = tuple[Tensor, Tensor]  # inputs x and labels y
Weights = Sequence[Tensor]
NU = 1e-7  # added to the norm of the gradient, as in the papers' simulators


def train(
    model: nn.Module, clients: Sequence[Samples], rho: float,
    *, rounds: int, cohort: int, local_epochs: int, batch_size: int, lr: float,
    seed: int = 0,
) -> nn.Module:  # fmt: skip
    """Return a copy of `model` trained with FedSAM of radius `rho` (0: FedAvg)."""
    model = copy.deepcopy(model).train()
    w = [p.detach().clone() for p in model.parameters()]
    for t in range(rounds):
        generator = seeds.generator(seed, "sample", t)
        ids = torch.randperm(len(clients), generator=generator)[:cohort]
        sums = [torch.zeros_like(p, dtype=torch.float64) for p in w]
        for i in ids.tolist():
            x, y = clients[i]
            batches: list[Samples] = []
            for epoch in range(local_epochs):
                order = seeds.permutations([i], [len(y)], seed, "shuffle", t, epoch)[0]
                xs, ys = x[order].split(batch_size), y[order].split(batch_size)
                batches += zip(xs, ys, strict=True)
            deltas = train_client(model, w, batches, rho, lr)
            for total, delta in zip(sums, deltas, strict=True):
                total += delta
        w = [(p + total / cohort).to(p.dtype) for p, total in zip(w, sums, strict=True)]
    return set_weights(model, w)


def train_client(
    model: nn.Module, w: Weights, batches: Sequence[Samples], rho: float, lr: float
) -> list[Tensor]:  # fmt: skip
    """Return the change of `w` by a step of SAM (SGD if `rho` is 0) on each batch."""
    local = list(w)
    for x, y in batches:
        g = gradient(model, local, x, y)
        if rho:
            squares = [part.square().sum(dtype=torch.float64) for part in g]
            scale = rho / (torch.stack(squares).sum().sqrt().item() + NU)
            perturbed = [p + scale * part for p, part in zip(local, g, strict=True)]
            g = gradient(model, perturbed, x, y)
        local = [p - lr * part for p, part in zip(local, g, strict=True)]
    return [p - start for p, start in zip(local, w, strict=True)]


def gradient(model: nn.Module, weights: Weights, x: Tensor, y: Tensor) -> Weights:
    """Return the gradient of the mean cross-entropy of a batch at `weights`."""
    loss = cross_entropy(set_weights(model, weights)(x), y)
    return torch.autograd.grad(loss, list(model.parameters()))


@torch.no_grad()
def set_weights(model: nn.Module, weights: Weights) -> nn.Module:
    """Copy `weights` into the parameters of `model` and return it."""
    for p, value in zip(model.parameters(), weights, strict=True):
        p.copy_(value)
    return model
