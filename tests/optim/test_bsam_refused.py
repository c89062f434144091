"""bSAM: what it refuses, and that nothing is lost by it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fastsam import SAM, BayesNewton, FusedSAM
from fastsam.optim.sharded import refuse_options
from fastsam.optim.variants import BSAM, VaSSO
from tests.helpers.bsam_cases import bsam
from tests.helpers.sam_oracle import copies, same_bits
from tests.helpers.variant_cases import problem


@pytest.mark.parametrize(
    ("base", "options", "words"),
    [
        (torch.optim.SGD, {"sam": BSAM(samples=9)}, "BSAM and fastsam.BayesNewton.* go together.*got BSAM with SGD"),
        (BayesNewton, {}, "go together.*got SAM with BayesNewton"),
        (BayesNewton, {"sam": VaSSO()}, "go together.*got VaSSO with BayesNewton"),
        (BayesNewton, {"sam": BSAM(samples=9), "exclusive": True}, "exclusive=True with BSAM"),
        (BayesNewton, {"sam": BSAM(samples=9), "stochastic_rounding": True}, "stochastic_rounding=True with BSAM"),
        (BayesNewton, {"sam": BSAM(samples=9), "exclusive": True, "in_backward": True}, "exclusive=True with BSAM"),
        (BayesNewton, {"sam": BSAM(samples=9), "damping": 0.0}, "damping must be above 0"),
        (BayesNewton, {"sam": BSAM(samples=9), "scale": -1.0}, "scale must be above 0"),
        (BayesNewton, {"sam": BSAM(samples=9), "weight_decay": -1.0}, "weight_decay must be 0 or more"),
        (BayesNewton, {"sam": BSAM(samples=9), "betas": (0.9, 1.0)}, "betas must be two numbers"),
    ],
)
def test_what_cannot_be_asked_for(base: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        FusedSAM([nn.Parameter(torch.ones(2))], base, lr=0.1, **options)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({}, TypeError, "samples"),
        ({"samples": 0}, ValueError, "samples must be the number of training samples"),
        ({"samples": "many"}, TypeError, "samples must be a number"),
        ({"samples": 9, "adaptive": True}, ValueError, "must be left as they are"),
        ({"samples": 9, "every": 2}, ValueError, "must be left as they are"),
        ({"samples": 9, "radius": max}, ValueError, "must be left as they are"),
        ({"samples": 9, "seed": 0.5}, TypeError, "seed must be an integer"),
    ],
)
def test_options_that_are_none(options: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        BSAM(**options)


def test_halves_out_of_order() -> None:
    training = bsam(1)
    opt = training.opt
    training.backward(1)
    for call in (opt.first_step, lambda: opt.perturbed().__enter__()):
        with pytest.raises(RuntimeError, match=r"call sample\(\) before the first backward pass"):
            call()
    with pytest.raises(RuntimeError, match="without first_step"):
        opt.second_step()
    opt.sample()
    for call in (opt.sample, lambda: opt.step(lambda: None), opt.second_step, lambda: opt.load_state_dict({})):
        with pytest.raises(RuntimeError):
            call()
    with opt.perturbed():
        assert opt.is_perturbed
    opt.sample()
    opt.restore()
    with pytest.raises(RuntimeError, match="nothing to restore"):
        opt.restore()
    assert same_bits(bsam(1).params, training.params)
    other = FusedSAM([nn.Parameter(torch.ones(2))], sam=SAM(), lr=0.1)
    other.sample()
    assert not other.is_perturbed


def test_a_scaler_is_refused() -> None:
    training, scaler = bsam(1), torch.amp.GradScaler("cpu", init_scale=2.0**10)
    before = copies(training.params)
    training.opt.sample()
    scaler.scale(problem()[1](training.params, 1)).backward()
    training.opt.first_step(zero_grad=True)
    scaler.scale(problem()[1](training.params, 1)).backward()
    with pytest.raises(RuntimeError, match="a GradScaler with BSAM"):
        scaler.step(training.opt)
    assert same_bits(before, training.params)


def test_parameters_that_are_split_among_ranks_are_refused() -> None:
    with pytest.raises(ValueError, match="BSAM with DTensor parameters"):
        refuse_options(BSAM(samples=9), stochastic_rounding=False, exclusive=False)


def test_options_that_change_to_what_it_cannot() -> None:
    training = bsam(1)
    before = copies(training.params)
    training.opt.param_groups[0]["adaptive"] = True
    with pytest.raises(ValueError, match="adaptive=True in a parameter group with BSAM"):
        training.opt.sample()
    training.opt.param_groups[0]["adaptive"] = False
    training.opt.param_groups[0]["damping"] = torch.tensor(0.1)
    with pytest.raises(TypeError, match="damping of BayesNewton must be a number"):
        training.opt.sample()
    assert same_bits(before, training.params)
