"""Gradients that exist before `step(closure)`: one warning if no step has used them."""

import copy
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn

from fastsam import FusedSAM
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
def told(times: int) -> Iterator[None]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    assert [w.category for w in caught] == [UserWarning] * times
    for w in caught:
        assert "inside the closure" in str(w.message) and w.filename == __file__


@pytest.mark.parametrize("before", [0, 1, 3], ids=lambda n: f"after {n} steps")
def test_accumulated_gradients_are_told_once(before: int) -> None:
    loop = Loop()
    with told(0):
        for _ in range(before):
            loop.step()
    with told(1):
        for _ in range(3):
            loop.opt.zero_grad()
            loop.closure()  # a micro-batch whose gradient no step will see
            loop.step()


def test_accumulation_into_the_gradients_of_the_last_step_is_told() -> None:
    loop = Loop()
    loop.step()
    with told(1):
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
    with told(1):
        opt.step(closure)


def _uncleared(loop: Loop) -> None:
    loop.step()


def _cleared(loop: Loop) -> None:
    loop.opt.zero_grad()
    loop.step()


def _zeroed(loop: Loop) -> None:
    loop.opt.zero_grad(set_to_none=False)
    loop.step()


def _in_two_halves(loop: Loop) -> None:
    loop.step()
    backward(loop.params, 0)
    loop.opt.first_step(zero_grad=True)
    loop.closure()
    loop.opt.second_step()


def _failing(loop: Loop) -> None:
    def failing() -> Tensor:
        loop.closure()
        raise KeyError

    with pytest.raises(KeyError):
        loop.opt.step(failing)
    loop.step()


def _copied(loop: Loop) -> None:
    loop.params, loop.opt = copy.deepcopy((loop.params, loop.opt))
    loop.step()


@pytest.mark.parametrize("one", [_uncleared, _cleared, _zeroed, _in_two_halves, _failing, _copied])
def test_nothing_is_told_where_nothing_is_lost(one: Callable[[Loop], None]) -> None:
    loop = Loop()
    with told(0):
        for _ in range(6):
            one(loop)


def test_watching_keeps_no_gradient() -> None:
    loop = Loop()
    loop.step()
    gone = [weakref.ref(p.grad) for p in loop.params]
    loop.opt.zero_grad()
    assert [g() for g in gone] == [None, None]
