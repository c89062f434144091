"""An independent federated loop for the tests: unfused, parameter by parameter, no line shared with fastsam.

Written from the papers' equations. Batches are taken in stored order (`shuffle=False`).
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


def smooth_model(dtype=torch.float64, seed=0):
    """tanh, no kinks: rounding differences stay rounding differences."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 3)).to(dtype)


def ragged_clients(dtype=torch.float64, sizes=(7, 16, 1, 23, 12), seed=1):
    """Clients of unequal sizes; one has a single sample."""
    generator = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randn(n, 6, generator=generator, dtype=torch.float64).to(dtype),
            torch.randint(0, 3, (n,), generator=generator),
        )
        for n in sizes
    ]


@dataclass
class Options:
    rounds: int = 4
    epochs: int = 1
    batch: int = 5
    lr: float = 0.1
    lr_decay: float = 0.9
    momentum: float = 0.0
    weight_decay: float = 0.0
    clip: float | None = None
    scope: str = "full"
    weighting: str = "uniform"
    server_lr: float = 1.0

    def keywords(self):
        """The same for fastsam.fed.run."""
        return {
            "rounds": self.rounds, "local_epochs": self.epochs, "batch_size": self.batch, "lr": self.lr, "lr_decay": self.lr_decay,
            "momentum": self.momentum, "weight_decay": self.weight_decay, "clip_norm": self.clip, "clip_scope": self.scope,
            "weighting": self.weighting, "server_lr": self.server_lr,
        }  # fmt: skip


@dataclass
class Method:
    """What distinguishes the papers, in their own terms."""

    rho: float | None = None  # None: no perturbation
    adaptive: bool = False
    eta: float = 0.0
    beta: float | None = None  # MoFedSAM
    k_epochs: bool = False
    mu: float = 0.0  # FedProx
    scaffold: bool = False


def flat_norm(tensors):
    return torch.cat([t.flatten() for t in tensors]).double().norm().item()


def gradient(model, x, y, loss=F.cross_entropy):
    return list(torch.autograd.grad(loss(model(x), y), list(model.parameters())))


def sam_gradient(model, x, y, method, loss):
    g = gradient(model, x, y, loss)
    if method.rho is None:
        return g
    saved = [p.detach().clone() for p in model.parameters()]
    t = [p.abs() + method.eta if method.adaptive else torch.ones_like(p) for p in saved]
    norm = flat_norm([ti * gi for ti, gi in zip(t, g)])
    with torch.no_grad():
        for p, w, ti, gi in zip(model.parameters(), saved, t, g):
            p.copy_(w + method.rho * ti**2 * gi / (norm + 1e-7))
    g = gradient(model, x, y, loss)
    with torch.no_grad():
        for p, w in zip(model.parameters(), saved):
            p.copy_(w)
    return g


def train_client(start, data, method, options, lr, direction, control, loss):
    """Local steps; the displacement per parameter, and the number of steps."""
    model = copy.deepcopy(start)
    anchor = [p.detach().clone() for p in model.parameters()]
    velocity = [torch.zeros_like(p) for p in anchor]
    x, y = data
    steps = 0
    for _ in range(options.epochs):
        for at in range(0, len(y), options.batch):
            g = sam_gradient(model, x[at : at + options.batch], y[at : at + options.batch], method, loss)
            if method.beta is not None:
                g = [method.beta * gi + (1 - method.beta) * di for gi, di in zip(g, direction)]
            if control is not None:
                g = [gi + c - ci for gi, c, ci in zip(g, *control)]
            weights = [p.detach().clone() for p in model.parameters()]
            pull = [method.mu * (w - w0) for w, w0 in zip(weights, anchor)]
            if options.scope == "full":
                inside, outside = [gi + p for gi, p in zip(g, pull)], [torch.zeros_like(p) for p in pull]
            else:
                # The released code clips the gradient with the constant half of the proximal term, and adds the rest as weight decay.
                inside = [gi - method.mu * w0 for gi, w0 in zip(g, anchor)]
                outside = [method.mu * w for w in weights]
            if options.clip is not None:
                factor = min(1.0, options.clip / (flat_norm(inside) + 1e-6))
                inside = [factor * i for i in inside]
            with torch.no_grad():
                for p, i, o, v in zip(model.parameters(), inside, outside, velocity):
                    v.mul_(options.momentum).add_(i + o + options.weight_decay * p)
                    p.sub_(lr * v)
            steps += 1
    return [p.detach() - w0 for p, w0 in zip(model.parameters(), anchor)], steps


def run(model, clients, method, options, active, loss=F.cross_entropy):
    """All rounds; `active[t]` are the clients of round t. Returns the final model."""
    model = copy.deepcopy(model)
    zeros = [torch.zeros_like(p) for p in model.parameters()]
    direction, c, c_i = zeros, zeros, dict.fromkeys(range(len(clients)), zeros)
    for t in range(options.rounds):
        lr = options.lr * options.lr_decay**t
        weights = {i: len(clients[i][1]) if options.weighting == "samples" else 1 for i in active[t]}
        total = sum(weights.values())
        move, new_direction, new_c = zeros, zeros, c
        for i in active[t]:
            control = (c, c_i[i]) if method.scaffold else None
            delta, steps = train_client(model, clients[i], method, options, lr, direction, control, loss)
            share = weights[i] / total
            move = [m + share * d for m, d in zip(move, delta)]
            k = options.epochs if method.k_epochs else steps
            new_direction = [n - share * d / (lr * k) for n, d in zip(new_direction, delta)]
            if method.scaffold:
                fresh = [old - g - d / (lr * steps) for old, g, d in zip(c_i[i], c, delta)]
                new_c = [n + (f - old) / len(clients) for n, f, old in zip(new_c, fresh, c_i[i])]
                c_i[i] = fresh
        direction, c = new_direction, new_c
        with torch.no_grad():
            for p, m in zip(model.parameters(), move):
                p.add_(options.server_lr * m)
    return model


def difference(a, b):
    """Relative difference of two models' weights, in the L2 norm."""
    pairs = list(zip(a.parameters(), b.parameters(), strict=True))
    return flat_norm([p.detach().double() - q.detach().double() for p, q in pairs]) / flat_norm(
        [q.detach() for _, q in pairs]
    )


def movement(a, b):
    """Largest absolute difference of two models' weights."""
    return (
        torch.cat([(p.detach() - q.detach()).flatten() for p, q in zip(a.parameters(), b.parameters(), strict=True)])
        .abs()
        .max()
        .item()
    )
