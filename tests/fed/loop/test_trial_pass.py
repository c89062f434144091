"""One look at a training pass before round 1: what it reads apart from model and batch, and what it changes, is refused
by name."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastsam import fed
from tests.helpers.fed_input import X, Y, start


class Odd(nn.Linear):
    """A linear model with a side effect, given by name."""

    def __init__(self, how: str) -> None:
        super().__init__(6, 3)
        self.how, self.calls = how, 0
        self.scale = torch.ones(3, requires_grad=True)  # which is not registered
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "counter":
            self.calls += 1
            return super().forward(x) / self.calls
        if self.how == "python":
            return super().forward(x) * random.random()
        if self.how == "numpy":
            return super().forward(x) * float(np.random.rand())
        if self.how == "layer drop":
            return super().forward(x) if random.random() < 2 else x
        if self.how == "input":
            x.relu_()
        if self.how == "buffer":
            self.mean = x.mean(0)
        if self.how == "attention":  # stored, and changes no result
            self.calls, self.seen = self.calls + 1, x.detach().sum()
        if self.how == "leaf inside":
            return super().forward(x + torch.zeros(6, requires_grad=True))
        return super().forward(x) * (self.scale if self.how == "unregistered" else 1)


@pytest.mark.parametrize("tree", [False, True], ids=["pairs", "trees"])
@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("counter", "repeated from the same weights, batch and seed, gives .* changes calls"),
        ("python", "changes Python's random numbers"),
        ("numpy", "changes numpy's random numbers"),
        ("layer drop", "changes Python's random numbers"),
        ("input", "writes into its batch"),
        ("buffer", r"replaces the buffer 'mean' .* Write into it: self.mean.copy_\(new\)"),
        ("unregistered", r"a gradient for a tensor of shape \[3\], which is not a parameter of the model"),
        ("attention", None),
        ("leaf inside", None),
    ],
)
def test_a_training_pass_with_a_side_effect(how: str, words: str | None, tree: bool) -> None:
    given, options = X.clone(), dict[str, Any](buffers="average", executor="sequential")
    clients: Any = [((given,), Y)] if tree else [(given, Y)]
    if words is None:
        start(Odd(how), clients, **options)
    else:
        with pytest.raises(ValueError, match=words):
            start(Odd(how), clients, **options)
    assert torch.equal(given, X)


def test_a_loss_that_refers_to_the_users_model() -> None:
    model, head = nn.Linear(6, 3), nn.Linear(3, 3)

    def penalised(outputs: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(outputs, y) + 0.05 * sum(p.pow(2).sum() for p in model.parameters())

    with pytest.raises(ValueError, match=r"refers to the parameter 'weight' of your model.*fed.BatchLoss"):
        start(model, loss=penalised)
    assert model.weight.grad is None
    with pytest.raises(ValueError, match="a gradient for 'head.(weight|bias)', which is not a parameter of the model"):
        start(model, loss=lambda outputs, y: F.cross_entropy(head(outputs), y))
    head.requires_grad_(False)
    start(model, loss=lambda outputs, y: F.cross_entropy(head(outputs), y))


def test_the_penalty_as_a_loss_of_the_batch() -> None:
    """The remedy that the refusal names."""

    def penalised(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1]) + 0.05 * sum(p.pow(2).sum() for p in model.parameters())

    start(nn.Linear(6, 3), loss=fed.BatchLoss(penalised))


@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_of_parameters(kind: str) -> None:
    model = nn.Linear(6, 3)
    getattr(model.weight, kind)(lambda g: None)
    with pytest.raises(ValueError, match="the parameter 'weight' has hooks, and clients train on copies without them"):
        start(model)


@pytest.mark.parametrize("executor", ["sequential", "threads", "vmap"])
def test_a_run_inside_an_autocast_region(executor: str) -> None:
    with torch.autocast("cpu"), pytest.raises(ValueError, match=r"inside torch.autocast.* the model's forward\(\)"):
        start(executor=executor)
