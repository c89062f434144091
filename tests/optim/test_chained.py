"""A base of several optimizers, such as Muon for matrices and AdamW for the rest: one norm, one state, one step."""

import copy
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from fastsam import GSAM, SAM, FusedSAM

Group = dict[str, Any]
FIRST = {"Muon": partial(torch.optim.Muon, lr=0.02), "SGD": partial(SGD, lr=0.02, momentum=0.9)}


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).double()


def split(model: nn.Module) -> list[Group]:
    """Return groups of matrices and of vectors, the vectors with a rate."""
    params = list(model.parameters())
    return [{"params": [p for p in params if p.dim() == 2]}, {"params": [p for p in params if p.dim() < 2], "lr": 0.1}]


def make(first: str) -> Callable[[list[Group]], list[Optimizer]]:
    return lambda groups: [FIRST[first](groups[:1]), AdamW(groups[1:], weight_decay=0.1)]


def loss_of(model: nn.Module, number: int) -> Tensor:
    x = torch.randn(16, 6, generator=torch.Generator().manual_seed(number)).double()
    return (model(x) - x[:, :4].sin()).square().mean()


def step(model: nn.Module, opt: FusedSAM, number: int) -> None:
    opt.step(lambda: loss_of(model, number).backward())


@pytest.mark.parametrize("first", FIRST)
@pytest.mark.parametrize("start", [0, 2])
def test_it_is_a_plain_loop_of_two_optimizers_with_one_norm(first: str, start: int) -> None:
    model, plain = make_model(), make_model()
    opt = FusedSAM(split(model), make(first), variant=SAM(0.3, start=start))
    params, optimizers = list(plain.parameters()), make(first)(split(plain))
    schedule = torch.optim.lr_scheduler.ExponentialLR(opt, 0.8)
    schedules = [torch.optim.lr_scheduler.ExponentialLR(one, 0.8) for one in optimizers]
    for number in range(4):
        step(model, opt, number)
        schedule.step()
        plain.zero_grad()
        loss_of(plain, number).backward()
        weights, grads = [p.detach().clone() for p in params], [p.grad.clone() for p in params if p.grad is not None]
        norm = torch.cat([g.flatten() for g in grads]).norm()
        if number >= start:
            with torch.no_grad():
                torch._foreach_add_(params, [0.3 * g / (norm + 1e-12) for g in grads])
            plain.zero_grad()
            loss_of(plain, number).backward()
            with torch.no_grad():
                torch._foreach_copy_(params, weights)
            assert opt.grad_norm is not None
            torch.testing.assert_close(opt.grad_norm.double(), norm, rtol=1e-10, atol=0.0)
        for one, its_schedule in zip(optimizers, schedules, strict=True):
            one.step()
            its_schedule.step()
        for p, q in zip(model.parameters(), params, strict=True):
            torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-9)


def by_state_dict(model: nn.Module, opt: FusedSAM, first: str) -> tuple[nn.Module, FusedSAM]:
    fresh = make_model()
    fresh.load_state_dict(model.state_dict())
    fresh_opt = FusedSAM(split(fresh), make(first), variant=GSAM(0.3, alpha=0.4))
    fresh_opt.load_state_dict(copy.deepcopy(opt.state_dict()))
    return fresh, fresh_opt


RESUMES: dict[str, Callable[..., tuple[nn.Module, FusedSAM]]] = {
    "state_dict": by_state_dict,
    "deepcopy": lambda model, opt, first: copy.deepcopy((model, opt)),
    "pickle": lambda model, opt, first: pickle.loads(pickle.dumps((model, opt))),
}


@pytest.mark.parametrize("first", FIRST)
@pytest.mark.parametrize("between", [False, True], ids=["between steps", "between passes"])
@pytest.mark.parametrize("how", RESUMES)
def test_resuming_has_equal_bits(how: str, between: bool, first: str) -> None:
    model = make_model()
    opt = FusedSAM(split(model), make(first), variant=GSAM(0.3, alpha=0.4))
    for number in range(2):
        step(model, opt, number)
    if between:
        loss_of(model, 2).backward()
        opt.first_step(zero_grad=True)
    resumed = RESUMES[how](model, opt, first)
    for one, its_opt in ((model, opt), resumed):
        if between:
            loss_of(one, 2).backward()
            its_opt.second_step(zero_grad=True)
        its_opt.param_groups[0]["lr"] = 0.01  # as schedulers do
        step(one, its_opt, 3)
    assert all(map(torch.equal, model.parameters(), resumed[0].parameters()))
    fields = [{name for p in group["params"] for name in opt.state[p]} for group in opt.param_groups]
    assert "momentum_buffer" in fields[0] and "exp_avg" in fields[1]


@pytest.mark.parametrize(
    ("base", "message"),
    [
        (lambda groups: [SGD(groups[:1])], "parameter group 1 belongs to no optimizer of the list"),
        (lambda groups: [SGD(groups), AdamW(groups[1:])], "parameter group 1 belongs to SGD and AdamW"),
        (lambda groups: [SGD(groups[0]["params"]), AdamW(groups[1:])], r"SGD has a group that is not.*\[:1\]"),
        (lambda groups: [SGD(groups[:1]), torch.optim.LBFGS(groups[1:])], "LBFGS calls a closure several times"),
        (lambda groups: [SGD(groups[:1]), AdamW], "made a type"),
        (lambda groups: [], "parameter group 0 belongs to no optimizer of the list"),
    ],
)
def test_what_is_no_division_of_the_groups_is_refused(base: Callable[..., Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        FusedSAM(split(make_model()), base)


def test_a_further_group_is_refused_and_not_added() -> None:
    opt = FusedSAM(split(make_model()), make("SGD"))
    with pytest.raises(ValueError, match="which of SGD and AdamW takes the new group"):
        opt.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    assert len(opt.param_groups) == len(opt.base_optimizer.param_groups) == 2
