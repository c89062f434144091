"""Variants of SAM that are asked for what they cannot do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fastsam import GSAM, SAM, FusedSAM
from fastsam.optim.variants import LESAM, WSAM, FriendlySAM, LookSAM, VaSSO
from tests.helpers.sam_oracle import backward, make_parameters


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"sam": GSAM(), "rho": 0.1}, ValueError, "beside sam"),
        ({"sam": GSAM(), "adaptive": True}, ValueError, "beside sam"),
        ({"sam": GSAM}, TypeError, "sam must be a variant"),
        ({"sam": "gsam"}, TypeError, "sam must be a variant"),
        ({"sam": GSAM(rho=-1.0)}, ValueError, "rho must be 0 or more"),
    ],
)
def test_what_cannot_be_asked_for(options: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        FusedSAM([nn.Parameter(torch.ones(2))], torch.optim.SGD, lr=0.1, **options)


@pytest.mark.parametrize(("every", "error"), [(0, ValueError), (-2, ValueError), (1.5, TypeError), (True, TypeError)])
def test_an_interval_that_is_none(every: Any, error: type[Exception]) -> None:
    for variant in (SAM, GSAM):
        with pytest.raises(error, match="every must be .* steps?, got"):
            variant(every=every)


def test_halves_out_of_order_in_a_step_that_does_not_perturb() -> None:
    params = make_parameters([(5, 3)], torch.float32)
    opt = FusedSAM(params, lr=0.1, sam=SAM(every=2))
    with pytest.raises(RuntimeError, match="without first_step"):
        opt.second_step()
    backward(params, 0)
    opt.first_step()
    opt.second_step()
    assert not opt.two_passes
    opt.first_step()
    with pytest.raises(RuntimeError, match="called already"):
        opt.first_step()
    with pytest.raises(RuntimeError, match="between first_step"):
        opt.step(lambda: None)
    opt.restore()
    with pytest.raises(RuntimeError, match="nothing to restore"):
        opt.restore()
    assert not opt.two_passes, "a step that was taken back does not count"
    opt.step()
    assert opt.two_passes


@pytest.mark.parametrize(
    ("variant", "options", "error", "words"),
    [
        (WSAM, {"gamma": 1.0}, ValueError, "gamma must be"),
        (WSAM, {"gamma": -0.1}, ValueError, "gamma must be"),
        (WSAM, {"gamma": float("nan")}, ValueError, "gamma must be"),
        (WSAM, {"decouple": "no"}, TypeError, "decouple must be"),
        (FriendlySAM, {"sigma": -1.0}, ValueError, "sigma must be"),
        (FriendlySAM, {"sigma": float("inf")}, ValueError, "sigma must be"),
        (FriendlySAM, {"lmbda": 1.0}, ValueError, "lmbda must be"),
        (VaSSO, {"theta": 0.0}, ValueError, "theta must be"),
        (VaSSO, {"theta": 1.5}, ValueError, "theta must be"),
        (VaSSO, {"every": 0}, ValueError, "every must be"),
        (LESAM, {"sigma": 0.0}, ValueError, "sigma must be"),
        (LESAM, {"sigma": float("nan")}, ValueError, "sigma must be"),
        (SAM, {"radius": 0.1}, TypeError, "radius must be a function"),
        (LookSAM, {"radius": 0.1}, TypeError, "radius must be a function"),
        (LookSAM, {"k": 0}, ValueError, "k must be 1 or more"),
        (LookSAM, {"k": 2.0}, TypeError, "k must be a whole number"),
        (LookSAM, {"every": 2}, ValueError, "every must be left at 1"),
        (LookSAM, {"alpha": -1.0}, ValueError, "alpha must be 0 or more"),
        (LookSAM, {"alpha": float("inf")}, ValueError, "finite"),
    ],
)
def test_an_option_out_of_its_range(variant: Any, options: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        variant(**options)


def test_a_base_optimizer_without_a_learning_rate_serves_no_decoupled_sharpness() -> None:
    class Fixed(torch.optim.Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {})

        def step(self, closure: Any = None) -> None: ...

    params = make_parameters([(3,)], torch.float32)
    with pytest.raises(ValueError, match="WSAM needs a base optimizer with a learning rate"):
        FusedSAM(params, Fixed, sam=WSAM())
    FusedSAM(params, Fixed, sam=WSAM(decouple=False))


@pytest.mark.parametrize("alpha", [-1.0, float("nan"), float("inf")])
def test_a_gap_out_of_range(alpha: float) -> None:
    with pytest.raises(ValueError, match="must be"):
        GSAM(alpha=alpha)
