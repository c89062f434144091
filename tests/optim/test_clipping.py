"""`max_grad_norm`: the combined gradient of every variant is clipped, by the same factor in each of its updates."""

import copy
import math
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from fastsam import GSAM, SAM, FusedSAM, backends
from fastsam.optim.variants import WSAM
from tests.helpers.nonsense import Hostile
from tests.helpers.sam_cases import SGD
from tests.helpers.sam_oracle import same_bits
from tests.helpers.trainings import VARIANTS
from tests.helpers.variant_cases import CASES, ONE_PASS, loop, make_fused, one_pass_loop

pytestmark = pytest.mark.usefixtures("poisoned_memory")
LIMIT = 0.3  # which most steps of the problem reach


@pytest.mark.parametrize("base", ["sgd", "adamw", "nadam"])
@pytest.mark.parametrize("name", CASES)
def test_it_clips_the_combined_gradient(name: str, base: str, backend: backends.Backend) -> None:
    if backend.device != "cpu":
        pytest.skip("the problem is on the CPU")
    case = CASES[name]
    weights = make_fused(case.sam, base, 6, backend.name, max_grad_norm=LIMIT).params
    expected, free = (loop(case.paper(), base, 6, limit) for limit in (LIMIT, math.inf))
    for p, q, r in zip(weights, expected, free, strict=True):
        torch.testing.assert_close(p.detach(), q, rtol=1e-9, atol=1e-11)
        assert not torch.allclose(q, r, rtol=1e-3)


@pytest.mark.parametrize("base", ["sgd", "adamw"])
@pytest.mark.parametrize("name", ONE_PASS)
def test_it_clips_the_gradient_of_a_variant_of_one_pass(name: str, base: str) -> None:
    variant, prefetcher = ONE_PASS[name]
    training = make_fused(variant, base, 6, max_grad_norm=LIMIT)
    training.opt.eval()
    for p, q in zip(training.params, one_pass_loop(prefetcher, base, 6, LIMIT), strict=True):
        torch.testing.assert_close(p.detach(), q, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("base", ["sgd", "adamw"])
@pytest.mark.parametrize("name", VARIANTS)
def test_a_limit_that_is_not_reached_changes_no_bit(name: str, base: str, dtype: torch.dtype) -> None:
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


@pytest.mark.parametrize("decouple", [True, False])
def test_wsam_descends_where_clipping_by_hand_climbs(decouple: bool) -> None:
    """`w**2` from 10."""
    w = nn.Parameter(torch.tensor([10.0]))
    opt = FusedSAM([w], SGD, variant=WSAM(0.05, gamma=0.9, decouple=decouple), lr=0.1, max_grad_norm=1.0)
    for _ in range(20):
        opt.step(lambda: w.square().sum().backward())
    torch.testing.assert_close(w.detach(), torch.tensor([8.0]), rtol=1e-5, atol=1e-5)


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


@pytest.mark.parametrize(
    ("limit", "error", "words"),
    [
        (0.0, ValueError, "max_grad_norm must be above 0"),
        (-1, ValueError, "max_grad_norm must be above 0"),
        (math.nan, ValueError, "max_grad_norm must be above 0"),
        (10**400, ValueError, "max_grad_norm must be a number that a float can hold"),
        (True, TypeError, "max_grad_norm must be a number or None"),
        ("1", TypeError, "max_grad_norm must be a number or None"),
        (Hostile(), TypeError, "max_grad_norm must be a number or None"),
    ],
)
def test_refused(limit: Any, error: type[Exception], words: str) -> None:
    params = [nn.Parameter(torch.ones(1))]
    with pytest.raises(error, match=words):
        FusedSAM(params, SGD, lr=0.1, max_grad_norm=limit)


def test_updates_in_the_backward_pass_know_no_norm() -> None:
    params = [nn.Parameter(torch.ones(1))]
    options: dict[str, Any] = {"assume_no_alias": True, "optimizer_in_backward": True}
    with pytest.raises(ValueError, match="with max_grad_norm, which needs all gradients"):
        FusedSAM(params, SGD, lr=0.1, max_grad_norm=1.0, **options)


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
