"""`max_grad_norm`: what it leaves alone, and clipping by hand. Clipped steps are among `test_variants.py`."""

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from fastsam import GSAM, SAM, FusedSAM
from fastsam.optim.variants import WSAM
from tests.helpers.sam_cases import SGD
from tests.helpers.sam_oracle import same_bits
from tests.helpers.trainings import VARIANTS, Spec
from tests.helpers.variant_cases import make_fused

pytestmark = pytest.mark.usefixtures("poisoned_memory")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("base", ["sgd", "adamw"])
@pytest.mark.parametrize("name", VARIANTS)
def test_a_limit_that_is_not_reached_changes_no_bit(name: str, base: str, dtype: torch.dtype) -> None:
    if not Spec(name, base, dtype, "plain").valid:
        pytest.skip("the variant does not have this base")
    loose, free = (
        make_fused(VARIANTS[name], base, 4, dtype=dtype, **options) for options in ({"max_grad_norm": 1e9}, {})
    )
    assert same_bits(loose.params, free.params)


@pytest.mark.parametrize("variant", [SAM(0.1), GSAM(0.1), WSAM(0.1), WSAM(0.1, decouple=False)], ids=str)
@pytest.mark.parametrize("base", [torch.optim.SGD, torch.optim.NAdam])
def test_the_scale_of_a_grad_scaler_changes_nothing(variant: SAM, base: Any) -> None:
    weights = []
    for scale in (1.0, 1024.0):
        w = nn.Parameter(torch.tensor([3.0, -4.0], dtype=torch.float64))
        opt = FusedSAM([w], base, variant=variant, lr=0.25, max_grad_norm=1.0)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        for _ in range(3):
            for half in (opt.first_step, lambda: scaler.step(opt)):  # noqa: B023
                opt.zero_grad()
                scaler.scale(w.square().sum()).backward()
                half()
            scaler.update()
        weights.append(w.detach())
    torch.testing.assert_close(*weights, rtol=1e-5, atol=1e-6)


def test_it_can_be_changed_between_steps_and_is_copied() -> None:
    w = nn.Parameter(torch.tensor([10.0]))
    opt = FusedSAM([w], SGD, lr=1.0, max_grad_norm=1.0)
    steps = []
    for limit in (1.0, 2.0, None):
        opt.max_grad_norm = limit
        old_weight = w.item()
        opt.step(lambda: w.square().sum().backward())
        steps.append(old_weight - w.item())
    assert steps[:2] == pytest.approx([1.0, 2.0]) and steps[2] > 10
    opt.max_grad_norm = 3
    assert copy.deepcopy(opt).max_grad_norm == 3.0


def _step_by_hand(opt: FusedSAM, w: nn.Parameter, clips: bool) -> None:
    for half in (opt.first_step, opt.second_step):
        opt.zero_grad()
        w.square().sum().backward()
        if clips and half == opt.second_step:
            torch.nn.utils.clip_grad_norm_([w], 1.0)
        half()


@pytest.mark.parametrize("variant", [GSAM(0.1), WSAM(0.1)], ids=str)
def test_clipping_by_hand_is_told_once(variant: SAM) -> None:
    w = nn.Parameter(torch.tensor([10.0]))
    opt = FusedSAM([w], SGD, variant=variant, lr=0.1)
    _step_by_hand(opt, w, clips=False)
    with pytest.warns(
        UserWarning, match=f"written between.*{type(variant).__name__} combines .*max_grad_norm="
    ) as records:
        _step_by_hand(opt, w, clips=True)
    assert len(records) == 1 and records[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _step_by_hand(opt, w, clips=True)


@pytest.mark.parametrize("variant", [SAM(0.1), GSAM(0.1)], ids=str)
def test_what_is_no_clipping_by_hand_is_not_told(variant: SAM) -> None:
    w = nn.Parameter(torch.tensor([10.0]))
    opt = FusedSAM([w], SGD, variant=variant, lr=0.1, max_grad_norm=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _step_by_hand(opt, w, clips=type(variant) is SAM)
        opt.step(lambda: w.square().sum().backward())
        for _ in range(2):  # two micro-batches
            w.square().sum().backward()
        opt.first_step(zero_grad=True)
        for _ in range(2):
            w.square().sum().backward()
        opt.second_step(zero_grad=True)
        scaler.scale(w.square().sum()).backward()
        opt.first_step(zero_grad=True)
        scaler.scale(w.square().sum()).backward()
        scaler.unscale_(opt)
        scaler.step(opt)
        scaler.update()
