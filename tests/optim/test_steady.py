"""The short look at an unchanged step: it finds exactly the gradients that the kernels may read where they lie."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fastsam import FusedSAM
from fastsam.optim import watch

pytestmark = pytest.mark.skipif(watch.TensorGuards is None, reason="this torch has no such guards")
SHAPES = [(3, 4), (1,), (), (2, 1, 3), (0,)]


class Case:
    """Parameters with gradients and entries of a state, and a look at them."""

    def __init__(self) -> None:
        self.params: list[Any] = [nn.Parameter(torch.randn(shape)) for shape in SHAPES]
        self.groups = [{"params": self.params}]
        self.state: dict[Any, Any] = {p: {} for p in self.params}
        for p in self.params:
            p.grad = torch.randn_like(p)
        self.look = watch.Steady(self.groups, list(self.params), [p.grad for p in self.params], self.state)

    def found(self) -> list[Tensor] | None:
        return self.look.gradients(self.groups, self.state)


def other_data(grad: Tensor, data: Tensor) -> None:
    grad.data = data


CHANGES: dict[str, Callable[[Case], Any]] = {
    "no gradient": lambda c: setattr(c.params[0], "grad", None),
    "a gradient of a subclass": lambda c: setattr(c.params[0], "grad", nn.Parameter(torch.ones(3, 4))),
    "a sparse gradient": lambda c: setattr(c.params[0], "grad", torch.ones(3, 4).to_sparse()),
    "a gradient in another order": lambda c: setattr(c.params[0], "grad", torch.ones(4, 3).t()),
    "a gradient that is expanded": lambda c: setattr(c.params[0], "grad", torch.ones(1, 4).expand(3, 4)),
    "a gradient of another dtype": lambda c: other_data(c.params[0].grad, torch.ones(3, 4, dtype=torch.float64)),
    "a gradient of another shape": lambda c: c.params[0].grad.resize_(2, 2),
    "a gradient of another rank": lambda c: c.params[0].grad.unsqueeze_(0),
    "a gradient with its sign pending": lambda c: setattr(c.params[1], "grad", torch._neg_view(torch.ones(1))),
    "a gradient without memory": lambda c: setattr(c.params[0], "grad", torch._efficientzerotensor(3, 4)),
    "a parameter elsewhere": lambda c: setattr(c.params[0], "data", torch.ones(3, 4)),
    "another parameter": lambda c: c.params.__setitem__(0, nn.Parameter(torch.ones(3, 4))),
    "one parameter less": lambda c: c.params.pop(),
    "one parameter more": lambda c: c.params.append(nn.Parameter(torch.ones(1))),
    "another entry": lambda c: c.state.__setitem__(c.params[2], {}),
    "one entry less": lambda c: c.state.pop(c.params[2]),
}


@pytest.mark.parametrize("change", CHANGES)
def test_it_finds_nothing_when_something_changed(change: str) -> None:
    case = Case()
    found = case.found()
    assert found is not None and all(g is p.grad for g, p in zip(found, case.params, strict=True))
    CHANGES[change](case)
    assert case.found() is None


def test_groups_that_become_one_take_its_options() -> None:
    """The parameters are the same ones in the same order then."""
    params = [nn.Parameter(torch.ones(2)) for _ in range(3)]
    opt = FusedSAM([{"params": params[:2], "lr": 0.0}, {"params": params[2:], "lr": 0.1}], torch.optim.SGD)
    for number in range(4):
        if number == 3:
            assert opt._engine._steady is not None
            opt.param_groups[0]["params"].extend(opt.param_groups.pop()["params"])
            before = params[2].detach().clone()
        for half in (opt.first_step, opt.second_step):
            for p in params:
                p.grad = torch.ones_like(p)
            half()
    assert torch.equal(params[2], before)


@pytest.mark.parametrize("backend", ["auto", "foreach", "reference"])
def test_a_step_keeps_no_gradient_alive(backend: str) -> None:
    params = [nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(2))]
    opt = FusedSAM(params, torch.optim.SGD, lr=0.1, momentum=0.9, backend=backend)
    for number in range(4):
        for half in (opt.first_step, opt.second_step):
            for p in params:
                p.grad = torch.ones_like(p)
            refs = [weakref.ref(p.grad) for p in params]
            half()
            assert number < 2 or opt._engine._steady is not None
            for p in params:
                p.grad = None
            assert [ref() for ref in refs] == [None, None]
