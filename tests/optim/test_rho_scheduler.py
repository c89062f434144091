"""Schedules of rho: the values that they write, and that they go on from a saved state."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LinearLR, OneCycleLR

from fastsam import FusedSAM
from fastsam.optim.rho_scheduler import ConstantRho, CosineRho, LinearRho
from tests.helpers.sam_cases import SGD

SCHEDULES: dict[str, tuple[Callable[[Any], ConstantRho], Callable[[int], float]]] = {
    "constant": (ConstantRho, lambda t: 0.4),
    "linear": (lambda opt: LinearRho(opt, min_lr=0.05, min_rho=0.1), lambda t: max(0.4 - 0.3 * t / 2, 0.1)),
    "cosine": (lambda opt: CosineRho(opt, 4, min_rho=0.2), lambda t: 0.3 + 0.1 * math.cos(math.pi * min(t, 4) / 4)),
}


def optimizer(rho: float | torch.Tensor = 0.4) -> tuple[FusedSAM, LinearLR]:
    opt = FusedSAM([nn.Parameter(torch.ones(2))], SGD, rho=rho, lr=0.1)
    return opt, LinearLR(opt, 1.0, 0.25, total_iters=3)  # 0.1, 0.075, 0.05, 0.025


@pytest.mark.parametrize("name", SCHEDULES)
def test_values(name: str) -> None:
    make, expected = SCHEDULES[name]
    opt, rates = optimizer()
    schedule = make(opt)
    for t in range(6):
        assert opt.param_groups[0]["rho"] == pytest.approx(expected(t))
        assert schedule.get_last_rho() == [opt.param_groups[0]["rho"]]
        opt.step(lambda: opt.param_groups[0]["params"][0].square().sum().backward())
        rates.step()
        schedule.step()


@pytest.mark.parametrize("name", SCHEDULES)
def test_it_goes_on_from_its_state(name: str) -> None:
    make, expected = SCHEDULES[name]
    opt, rates = optimizer()
    schedule = make(opt)
    for _ in range(2):
        opt._opt_called = True  # type: ignore[attr-defined]
        rates.step()
        schedule.step()
    other_opt = optimizer()[0]
    other_opt.load_state_dict(opt.state_dict())
    new_schedule = make(other_opt)
    new_schedule.load_state_dict(schedule.state_dict())
    assert other_opt.param_groups[0]["rho"] == pytest.approx(expected(2))
    assert new_schedule.last_step == 2 and new_schedule.max_rhos == [0.4]


def test_a_tensor_is_written_in_place_and_new_groups_are_followed() -> None:
    rho = torch.tensor(0.4)
    opt, _ = optimizer(rho)
    schedule = CosineRho(opt, 2)
    opt.add_param_group({"params": [nn.Parameter(torch.ones(1))], "rho": 1.0})
    schedule.step()
    assert opt.param_groups[0]["rho"] is rho and rho.item() == pytest.approx(0.2)
    assert opt.param_groups[1]["rho"] == pytest.approx(0.5)


@pytest.mark.parametrize("max_lr", [None, 1.0])
def test_the_largest_rate_of_a_one_cycle_schedule_is_its_peak(max_lr: float | None) -> None:
    """The warm-up starts at a 25th of the peak, and rho follows the rate up and down."""
    opt = FusedSAM([nn.Parameter(torch.ones(2))], SGD, rho=0.4, lr=0.1)
    rates = OneCycleLR(opt, max_lr=1.0, total_steps=10)
    schedule, radii = LinearRho(opt, max_lr), []
    for _ in range(9):
        opt.step(lambda: opt.param_groups[0]["params"][0].square().sum().backward())
        rates.step()
        schedule.step()
        assert opt.param_groups[0]["rho"] == pytest.approx(0.4 * opt.param_groups[0]["lr"])
        radii.append(opt.param_groups[0]["rho"])
    assert max(radii) == pytest.approx(0.4) and radii[0] < 0.3


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda opt: CosineRho(opt, 0), "total_steps must be 1 or more"),
        (lambda opt: LinearRho(opt, max_lr=0.1, min_lr=0.1), "max_lr must be above min_lr"),
        (lambda opt: ConstantRho(SGD(opt.param_groups[0]["params"], lr=0.1)), "parameter group 0 has no rho"),
        (
            lambda opt: ConstantRho(opt).load_state_dict(CosineRho(opt, 2).state_dict()),
            "not the state of a Const",
        ),
        (lambda opt: ConstantRho(opt).load_state_dict({"last_step": 1, "max_rhos": []}), "0 parameter groups"),
    ],
)
def test_refused(make: Callable[[FusedSAM], Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make(optimizer()[0])
