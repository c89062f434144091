"""Copies, pickles, state shared with the base optimizer, and groups added: nothing is lost."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fastsam import FusedSAM
from fastsam.backends import Backend
from tests.helpers import sam_cases
from tests.helpers.sam_cases import ADAM, SGD, Model, train
from tests.helpers.sam_oracle import backward, make_parameters, same_bits

pytestmark = pytest.mark.usefixtures("poisoned_memory")

BASES = {**sam_cases.BASES, "amsgrad": (ADAM, {"lr": 0.05, "amsgrad": True})}


# --- copies and pickles ---


def test_a_copy_works_with_hooks_and_schedulers(backend: Backend) -> None:
    model = Model(torch.float32, backend.device)
    opt = FusedSAM(model.parameters(), SGD, lr=0.1, momentum=0.9, backend=backend.name)
    torch.optim.lr_scheduler.StepLR(opt, 1)
    other_model, other_opt = copy.deepcopy((model, opt))
    calls: list[int] = []
    other_opt.register_step_post_hook(lambda *_: calls.append(1))
    train(other_model, other_opt, range(2))
    assert len(calls) == 2
    assert repr(other_opt).startswith("FusedSAM (")


# --- the base optimizer shares everything ---


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_the_base_optimizer_may_step_by_itself(name: str, backend: Backend) -> None:
    """An ordinary step of the base optimizer, before and after fused ones, uses and makes the same state."""
    base, options = BASES[name]

    def plain_step(opt: Any, params: list[nn.Parameter], step: int) -> None:
        backward(params, step)
        opt.step()

    model, reference = Model(torch.float64, backend.device), Model(torch.float64, backend.device)
    opt = FusedSAM(model.parameters(), base, backend=backend.name, rho=0.0, **options)
    plain = base(reference.parameters(), **options)
    for step in range(6):
        if step in (2, 3, 5):
            train(model, opt, range(step, step + 1))
        else:
            plain_step(opt.base_optimizer, model.params, step)
        plain_step(plain, reference.params, step)
    for p, q in zip(model.params, reference.params):
        torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-12)
    assert opt.base_optimizer.state is opt.state


@pytest.mark.parametrize("reset", ["new dict", "clear", "one parameter", "one tensor", "deleted tensor", "set to None"])
def test_state_that_a_user_resets(reset: str, backend: Backend) -> None:
    model = Model(torch.float64, backend.device)
    opt = FusedSAM(model.parameters(), SGD, lr=0.1, momentum=0.9, backend=backend.name)
    train(model, opt, range(3))
    first = model.params[0]
    assert not torch.equal(opt.state[first]["momentum_buffer"], torch.zeros_like(first))
    if reset == "new dict":
        opt.state = type(opt.state)(dict)
    elif reset == "clear":
        opt.state.clear()
    elif reset == "one parameter":
        opt.state[first] = {}
    elif reset == "one tensor":
        opt.state[first]["momentum_buffer"] = torch.zeros_like(first)
    elif reset == "deleted tensor":
        del opt.state[first]["momentum_buffer"]
    else:
        opt.state[first]["momentum_buffer"] = None
    old_weight = first.detach().clone()
    backward(model.params, 3)
    opt.first_step()
    backward(model.params, 3)
    gradient = first.grad.clone()
    opt.second_step()
    torch.testing.assert_close(first.detach(), old_weight - 0.1 * gradient, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(opt.state[first]["momentum_buffer"], gradient, rtol=1e-12, atol=1e-12)
    assert opt.base_optimizer.state is opt.state


# --- groups ---


def test_named_parameters(backend: Backend) -> None:
    model = Model(torch.float32, backend.device)
    opt = FusedSAM(model.named_parameters(), SGD, lr=0.1, momentum=0.9, backend=backend.name)
    train(model, opt, range(2))
    state_dict = opt.state_dict()
    assert state_dict["param_groups"][0]["param_names"] == ["weights.0", "weights.1", "weights.2"]
    opt.load_state_dict(state_dict)
    train(model, opt, range(2))


def test_a_group_appended_by_hand_is_noticed(backend: Backend) -> None:
    """Not the way to do it, but done: `param_groups[0]["params"].append(p)`."""
    model = Model(torch.float64, backend.device)
    extra = make_parameters([(6,)], torch.float64, backend.device, seed=5)[0]
    opt = FusedSAM(model.parameters(), SGD, lr=0.1, momentum=0.9, backend=backend.name)
    train(model, opt, range(2))
    momentum = opt.state[model.params[0]]["momentum_buffer"].clone()
    opt.param_groups[0]["params"].append(extra)
    extra.grad = torch.ones_like(extra)
    old_weight: Tensor = extra.detach().clone()
    for p in model.params:
        p.grad = None
    opt.first_step()
    opt.second_step()
    torch.testing.assert_close(extra.detach(), old_weight - 0.1)
    assert same_bits([momentum], [opt.state[model.params[0]]["momentum_buffer"]])
