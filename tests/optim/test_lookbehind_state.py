"""Lookbehind between any two of its passes: taken back, saved, copied, moved and converted."""

from __future__ import annotations

import copy
import io
import itertools
from typing import Any

import pytest
import torch

from fastsam import SAM, FusedSAM
from fastsam.optim.variants import Lookbehind
from tests.helpers.sam_oracle import backward, copies, make_parameters, same_bits
from tests.helpers.variant_cases import RHO, Training, fused

THREE = Lookbehind(RHO, k=3, alpha=0.4)


@pytest.mark.parametrize("made", [1, 2, 3])
def test_a_step_that_is_taken_back_after_any_ascent(made: int) -> None:
    training = fused(THREE, "adamw", 2)
    before, state = copies(training.params), training.opt.state_dict()
    for _ in range(made):
        training.backward(9)
        training.opt.first_step()
    training.opt.restore()
    assert same_bits(before, training.params)
    assert torch.equal(state["state"][0]["exp_avg"], training.opt.state_dict()["state"][0]["exp_avg"])
    assert same_bits(training.steps(range(2, 4)).params, fused(THREE, "adamw", 4).params)


def resumed(training: Training, how: str, fresh: Training) -> Training:
    if how == "deepcopy":
        return copy.deepcopy(training)
    file = io.BytesIO()
    torch.save(training if how == "pickle" else training.opt.state_dict(), file)
    file.seek(0)
    found: Any = torch.load(file, weights_only=how == "state dict")
    if how == "pickle":
        return found  # type: ignore[no-any-return]
    with torch.no_grad():
        for p, old in zip(fresh.params, training.params, strict=True):
            p.copy_(old)
    fresh.opt.load_state_dict(found)
    return fresh


@pytest.mark.parametrize("how", ["state dict", "pickle", "deepcopy"])
@pytest.mark.parametrize("made", [1, 2, 3])
@pytest.mark.parametrize(
    ("base", "dtype", "options"),
    [
        ("sgd", torch.float32, {}),
        ("sgd", torch.bfloat16, {"stochastic_rounding": True}),
        ("nadam", torch.bfloat16, {}),
    ],
    ids=["float32", "masters", "its own step"],
)
def test_a_step_goes_on_after_any_ascent(
    base: str, dtype: torch.dtype, options: dict[str, Any], made: int, how: str
) -> None:
    whole = fused(THREE, base, 4, dtype=dtype, **options)
    training = fused(THREE, base, 2, dtype=dtype, **options)
    for _ in range(made):
        training.backward(2)
        training.opt.first_step(zero_grad=True)
    training = resumed(training, how, fused(THREE, base, 0, dtype=dtype, **options))
    assert training.opt.phase == ("second" if made == 3 else "first")
    training.ascend(2)
    training.backward(2)
    training.opt.second_step()
    assert same_bits(whole.params, training.steps(range(3, 4)).params)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_weights_that_get_other_memory_between_any_passes(dtype: torch.dtype) -> None:
    training = fused(THREE, "sgd", 2, dtype=dtype)
    for made in range(4):
        for p in training.params:
            p.data = p.data.clone()
        training.backward(2)
        (training.opt.second_step if made == 3 else training.opt.first_step)()
    assert same_bits(training.params, fused(THREE, "sgd", 3, dtype=dtype).params)


def test_weights_that_are_converted_between_any_passes() -> None:
    """The sum, and what is saved, follow."""
    whole = fused(THREE, "sgd", 3)
    for after in (1, 2, 3):
        training = fused(THREE, "sgd", 2)
        for made in range(4):
            for p in training.params if made == after else ():
                p.data = p.data.float()
            training.backward(2)
            (training.opt.second_step if made == 3 else training.opt.first_step)()
        for found, expected in zip(training.params, whole.params, strict=True):
            torch.testing.assert_close(found.double(), expected.double(), rtol=1e-4, atol=1e-5)


def test_a_state_with_more_ascents_than_there_are_here() -> None:
    training, other = fused(THREE, "sgd", 1), fused(Lookbehind(RHO, k=2), "sgd", 1)
    training.ascend(1)
    before = copies(other.params)
    with pytest.raises(ValueError, match="after 3 ascents of a step, and this optimizer's Lookbehind makes 2"):
        other.opt.load_state_dict(training.opt.state_dict())
    with pytest.raises(ValueError, match="of Lookbehind, between its two passes, and this optimizer's is SAM"):
        fused(SAM(RHO), "sgd", 1).opt.load_state_dict(training.opt.state_dict())
    training.opt.restore()
    other.opt.load_state_dict(training.opt.state_dict())  # between steps k is an option as any other
    assert same_bits(before, other.params)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("joins", [1, 2, 3])
def test_a_parameter_that_joins_in_any_pass(joins: int, dtype: torch.dtype) -> None:
    """Frozen up to there, it had no buffers; the step is as if it only had had no gradient."""
    ends = []
    for frozen in (True, False):
        params = make_parameters([(5, 3), (8,)], dtype)
        opt = FusedSAM(params, torch.optim.SGD, sam=THREE, lr=0.05, momentum=0.9)
        for number, passed in itertools.product(range(3), range(4)):
            late = (number, passed) < (1, joins)
            params[1].requires_grad_(not (late and frozen))
            backward(params, number)
            if late:
                params[1].grad = None
            (opt.first_step if passed < 3 else opt.second_step)()
        ends.append(params)
    assert same_bits(*ends)
