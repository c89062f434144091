"""Gradients that exist before `step(closure)`: one warning if no step has used them. Passes that are missing, and
weights that are written between the halves of a step: one warning too."""

import copy
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fastsam import FusedSAM, variants
from tests.helpers.sam_oracle import backward, landscape, make_parameters

SGD = torch.optim.SGD


class Loop:
    """A model of two parameters, its optimizer, and the ways in which people write a step."""

    def __init__(self) -> None:
        self.params = make_parameters([(5, 3), (8,)], torch.float32)
        self.opt = FusedSAM(self.params, SGD, lr=0.01, momentum=0.9)

    def closure(self) -> Tensor:
        loss = landscape(self.params, 0)
        loss.backward()
        return loss

    def step(self) -> None:
        self.opt.step(self.closure)


@contextmanager
def expect_warnings(times: int) -> Iterator[None]:
    with warnings.catch_warnings(record=True) as records:
        warnings.simplefilter("always")
        yield
    assert [w.category for w in records] == [UserWarning] * times
    for w in records:
        assert "inside the closure" in str(w.message) and w.filename == __file__


@pytest.mark.parametrize("steps", [0, 1, 3], ids=lambda n: f"after {n} steps")
def test_accumulated_gradients_are_told_once(steps: int) -> None:
    loop = Loop()
    with expect_warnings(0):
        for _ in range(steps):
            loop.step()
    with expect_warnings(1):
        for _ in range(3):
            loop.opt.zero_grad()
            loop.closure()  # a micro-batch whose gradient no step will see
            loop.step()


def test_accumulation_into_the_gradients_of_the_last_step_is_told() -> None:
    loop = Loop()
    loop.step()
    with expect_warnings(1):
        loop.params[1].grad.add_(1)  # only the last parameter: a new version of the same tensors
        loop.step()


def test_new_gradients_in_the_place_of_old_ones_are_told() -> None:
    """With one parameter, the new gradient may have the id of the old one, which was freed."""
    p = nn.Parameter(torch.ones(3))
    opt = FusedSAM([p], SGD, lr=0.1)

    def closure() -> Tensor:
        loss = p.square().sum()
        loss.backward()
        return loss

    opt.step(closure)
    opt.zero_grad()
    p.square().sum().backward()
    with expect_warnings(1):
        opt.step(closure)


def _keep_grads(loop: Loop) -> None:
    loop.step()


def _clear_grads(loop: Loop) -> None:
    loop.opt.zero_grad()
    loop.step()


def _zero_grads(loop: Loop) -> None:
    loop.opt.zero_grad(set_to_none=False)
    loop.step()


def _in_two_halves(loop: Loop) -> None:
    loop.step()
    backward(loop.params, 0)
    loop.opt.first_step(zero_grad=True)
    loop.closure()
    loop.opt.second_step()


def _raise_error(loop: Loop) -> None:
    def failing_closure() -> Tensor:
        loop.closure()
        raise KeyError

    with pytest.raises(KeyError):
        loop.opt.step(failing_closure)
    loop.step()


def _copy_loop(loop: Loop) -> None:
    loop.params, loop.opt = copy.deepcopy((loop.params, loop.opt))
    loop.step()


@pytest.mark.parametrize("action", [_keep_grads, _clear_grads, _zero_grads, _in_two_halves, _raise_error, _copy_loop])
def test_nothing_is_told_where_nothing_is_lost(action: Callable[[Loop], None]) -> None:
    loop = Loop()
    with expect_warnings(0):
        for _ in range(6):
            action(loop)


def test_watching_keeps_no_gradient() -> None:
    loop = Loop()
    loop.step()
    references = [weakref.ref(p.grad) for p in loop.params]
    loop.opt.zero_grad()
    assert [g() for g in references] == [None, None]


MISSING = "second backward pass is missing"


@pytest.mark.parametrize("clears", [False, True], ids=["the first gradients are there", "none are there"])
@pytest.mark.parametrize("end", ["second_step", "step"])
def test_a_missing_second_pass_is_told_once(clears: bool, end: str) -> None:
    loop = Loop()
    with warnings.catch_warnings(record=True) as records:
        warnings.simplefilter("always")
        for _ in range(3):
            loop.opt.zero_grad()
            loop.closure()
            loop.opt.first_step(zero_grad=clears)
            getattr(loop.opt, end)()
    assert [(w.category, w.filename) for w in records] == [(UserWarning, __file__)]
    assert MISSING in str(records[0].message)
    assert ("without gradients" if clears else "without SAM") in str(records[0].message)


def _clear_and_repeat(loop: Loop) -> None:
    loop.opt.zero_grad()
    loop.closure()


def _accumulate(loop: Loop) -> None:
    loop.closure()


def _write_by_hand(loop: Loop) -> None:
    for p in loop.params:
        p.grad = torch.ones_like(p)


def _leave_all_but_one(loop: Loop) -> None:
    loop.params[1].grad = torch.ones_like(loop.params[1])


@pytest.mark.parametrize("second_pass", [_clear_and_repeat, _accumulate, _write_by_hand, _leave_all_but_one])
@pytest.mark.parametrize("clears", [False, True])
def test_a_second_pass_of_any_kind_is_not_told(second_pass: Callable[[Loop], None], clears: bool) -> None:
    loop = Loop()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(6):
            loop.opt.zero_grad()
            loop.closure()
            loop.opt.first_step(zero_grad=clears)
            second_pass(loop)
            loop.opt.second_step()


def test_steps_that_do_not_perturb_or_are_given_up_need_no_second_pass() -> None:
    params = make_parameters([(5, 3), (8,)], torch.float32)
    opt = FusedSAM(params, SGD, lr=0.01, variant=variants.LookSAM(k=2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for number in range(4):
            opt.zero_grad()
            landscape(params, number).backward()
            opt.first_step()
            if opt.is_perturbed:
                opt.restore()
                opt.first_step()
                opt.zero_grad()
                landscape(params, number).backward()
            opt.second_step()


@contextmanager
def expect_one(words: str) -> Iterator[None]:
    with warnings.catch_warnings(record=True) as records:
        warnings.simplefilter("always")
        yield
    assert [(w.category, w.filename) for w in records] == [(UserWarning, __file__)]
    assert words in str(records[0].message)


VARIANTS = {"sam": {}, "every second": {"variant": variants.SAM(interval=2)}, "one pass": {"variant": variants.MSAM()}}


@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)
def test_a_closure_without_a_backward_pass_is_told_once(options: dict[str, Any]) -> None:
    params = make_parameters([(5, 3), (8,)], torch.float32)
    opt = FusedSAM(params, SGD, lr=0.01, momentum=0.9, **options)
    with expect_one("the closure made no gradient"):
        for _ in range(3):
            opt.step(lambda: landscape(params, 0))


def test_a_first_half_without_a_gradient_is_told_once() -> None:
    loop = Loop()
    with expect_one("first_step() found no gradient"):
        for _ in range(3):
            loop.opt.first_step(zero_grad=True)
            loop.closure()
            loop.opt.second_step(zero_grad=True)


def take_halves(loop: Loop, between: Callable[[], object]) -> None:
    for _ in range(3):
        loop.opt.zero_grad()
        loop.closure()
        loop.opt.first_step(zero_grad=True)
        loop.closure()
        between()
        loop.opt.second_step()


def test_a_step_of_another_optimizer_between_the_halves_is_told_once() -> None:
    loop = Loop()
    other = SGD([{"params": loop.params[1:]}, {"params": make_parameters([(2,)], torch.float32)}], lr=1.0)
    with expect_one("parameters [1] were written between first_step() and second_step()"):
        take_halves(loop, other.step)


def test_a_step_on_other_parameters_between_the_halves_is_not_told() -> None:
    loop, other = Loop(), Loop()
    other.closure()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        take_halves(loop, SGD(other.params, lr=1.0).step)
        loop.opt.zero_grad()
        loop.opt = FusedSAM(loop.params, SGD, lr=0.01, variant=variants.SAM(interval=4))
        loop.step()  # the three steps after this one restore nothing
        take_halves(loop, SGD(loop.params, lr=1.0).step)
