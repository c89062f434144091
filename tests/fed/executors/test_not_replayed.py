"""Passes of stacked clients that are not replayed: what has an effect beside its result runs through the model's own
code each time."""

from __future__ import annotations

import logging
import random

import numpy as np
import pytest
import torch
from torch import nn

from fastsam.fed.executors.replay import Replays
from tests.helpers.stacked_passes import stacked


class Changing(nn.Linear):
    """A forward pass with a side effect, given by name."""

    def __init__(self, how):
        super().__init__(3, 2)
        self.how, self.calls, self.seen, self.rate, self.inner = how, 0, [], 1.0, nn.Identity()

    def forward(self, x):
        {
            "counter": lambda: setattr(self, "calls", self.calls + 1),
            "list": lambda: self.seen.append(1),
            "inner": lambda: setattr(self.inner, "rate", x.shape[0]),
            "python": random.random,
            "numpy": np.random.rand,
        }[self.how]()
        return super().forward(x)


@pytest.mark.parametrize(
    ("how", "words"),
    [("counter", "calls"), ("list", "seen"), ("inner", "inner.rate"), ("python", "Python's"), ("numpy", "numpy's")],
)
def test_a_forward_that_changes_pythons_state_is_not_replayed(how, words, caplog):
    passes, form = stacked(Changing(how))
    x, y = torch.randn(5, 4, 3), torch.zeros(5, 4, dtype=torch.int64)
    with caplog.at_level(logging.INFO, "fastsam.fed"):
        for _ in range(3):
            assert passes.replays.run(form.leaves, x, y) is None
    assert words in passes.replays.reason
    assert caplog.text.count("not replayed: the model's forward pass changes") == 1


def test_what_was_no_constant_is_found_at_the_second_pass(caplog):
    outside = [1.0]

    class Schedule(nn.Linear):
        def forward(self, x):
            return super().forward(x) * outside[0]

    passes, form = stacked(Schedule(3, 2))
    x, y = torch.randn(5, 4, 3), torch.zeros(5, 4, dtype=torch.int64)
    assert passes.replays.run(form.leaves, x, y) is not None
    outside[0] = 2.0
    with caplog.at_level(logging.INFO, "fastsam.fed"):
        losses, gradients = passes.run(form, x, y)
    plain, expected = passes.plain(form, x, y)
    assert torch.equal(losses, plain) and all(map(torch.equal, gradients.tensors, expected.tensors))
    assert "not a function of its inputs" in caplog.text


class Overwrites(nn.Linear):
    """What others read: the batch."""

    def forward(self, x):
        return super().forward(x.mul_(0.5))


class Looks(nn.Linear):
    def forward(self, x):
        return super().forward(x) * float(self.fixed.max())


@pytest.mark.parametrize(("kind", "words"), [(Overwrites, "writes"), (Looks, "data-dependent control flow")])
def test_passes_that_cannot_be_recorded_run_plainly(kind, words, caplog):
    model = kind(3, 2)
    model.register_buffer("fixed", torch.ones(2))
    passes, form = stacked(model)
    x, y = torch.randn(5, 4, 3), torch.zeros(5, 4, dtype=torch.int64)
    with caplog.at_level(logging.INFO, "fastsam.fed"):
        for _ in range(3):
            losses, gradients = passes.run(form, x.clone(), y)
    plain, expected = passes.plain(form, x.clone(), y)
    assert torch.equal(losses, plain) and all(map(torch.equal, gradients.tensors, expected.tensors))
    assert caplog.text.count(words) == 1


def test_results_of_elsewhere_are_not_taken_for_constants(caplog):
    """As when a backward pass runs where nothing is recorded."""
    passes, form = stacked(nn.Linear(4, 1, bias=False))
    fixed = torch.ones(5), [torch.ones(5, 1, 4)]
    replays = Replays(lambda weights, x, y: fixed, passes.module, passes.layout)
    with caplog.at_level(logging.INFO, "fastsam.fed"):
        assert replays.run(form.leaves, torch.zeros(5, 1), torch.zeros(5, 1)) is None
    assert "not recorded" in caplog.text
