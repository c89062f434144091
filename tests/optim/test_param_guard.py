"""`ParamGuard`, which compares an unchanged step at once: it finds exactly the gradients that are expected."""

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fastsam import FusedSAM
from fastsam.optim import param_guard
from fastsam.optim.param_tracking import WeightState

pytestmark = pytest.mark.skipif(param_guard.TensorGuards is None, reason="this torch has no such guards")
SHAPES = [(3, 4), (1,), (), (2, 1, 3), (0,)]


class Case:
    """Parameters of a FusedSAM with the gradients that its guard expects, in the first or the second pass of a step."""

    def __init__(
        self, first: bool, dtypes: tuple[torch.dtype, ...] = (torch.float32,), lacks_one: bool = False
    ) -> None:
        self.first = first
        tensors = [torch.randn(shape, dtype=dtypes[i % len(dtypes)]) for i, shape in enumerate(SHAPES)]
        self.all_params = [nn.Parameter(tensor) for tensor in tensors]
        self.without_gradient = self.all_params[3] if lacks_one else None
        opt = FusedSAM(self.all_params, torch.optim.SGD, lr=0.0, momentum=0.9)
        for _ in range(2):
            for half in (opt.first_step, opt.second_step):
                self.backward()
                half()
        self.backward()
        guard = opt._engine._guard
        assert guard is not None
        self.guard, self.state = guard, opt.state
        self.groups: list[Any] = opt.param_groups
        self.params: list[Any] = opt.param_groups[0]["params"]

    def backward(self) -> None:
        for p in self.all_params:
            p.grad = None if p is self.without_gradient else torch.randn_like(p)

    def read_guard(self) -> list[Tensor] | None:
        calls = self.guard.gradients(self.groups, self.state, self.first)
        return None if calls is None else [g for _, _, grads in calls for g in grads]


def other_data(grad: Tensor, data: Tensor) -> None:
    grad.data = data


def expected(opt: FusedSAM) -> bool:
    """Return True if the guard expects gradients in the pass that comes next."""
    engine = opt._engine
    return engine._guard is not None and (engine.weight_state is WeightState.ORIGINAL) in engine._guard.expectations


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


@pytest.mark.parametrize("first", [True, False], ids=["first", "second"])
@pytest.mark.parametrize("change", CHANGES)
def test_it_finds_nothing_when_something_changed(change: str, first: bool) -> None:
    case = Case(first)
    gradients = case.read_guard()
    assert gradients is not None and all(g is p.grad for g, p in zip(gradients, case.params, strict=True))
    CHANGES[change](case)
    assert case.read_guard() is None


@pytest.mark.parametrize("first", [True, False], ids=["first", "second"])
def test_two_dtypes_and_a_missing_gradient_are_expected_too(first: bool) -> None:
    case = Case(first, (torch.float32, torch.bfloat16), lacks_one=True)
    gradients = case.read_guard()
    assert gradients is not None and len(gradients) == len(SHAPES) - 1
    assert set(map(id, gradients)) == {id(p.grad) for p in case.all_params if p is not case.without_gradient}
    case.all_params[3].grad = torch.ones_like(case.all_params[3])
    assert case.read_guard() is None
    case.all_params[3].grad, case.all_params[2].grad = None, None
    assert case.read_guard() is None


def test_a_parameter_of_another_kind_at_its_address_is_seen_in_the_first_pass() -> None:
    case = Case(True)
    case.params[0].data = case.params[0].data.view(4, 3)
    case.params[0].grad = torch.ones(4, 3)
    assert case.read_guard() is None


REGROUPINGS: dict[str, Callable[[list[Any]], Any]] = {
    "one group": lambda groups: groups[0]["params"].extend(groups.pop()["params"]),
    "the next group": lambda groups: groups[1]["params"].insert(0, groups[0]["params"].pop()),
}


@pytest.mark.parametrize("regrouping", REGROUPINGS)
def test_a_parameter_that_changes_its_group_takes_the_other_options(regrouping: str) -> None:
    """The parameters are the same ones in the same order then."""
    params = [nn.Parameter(torch.ones(2)) for _ in range(3)]
    opt = FusedSAM([{"params": params[:2], "lr": 0.1}, {"params": params[2:], "lr": 0.0}], torch.optim.SGD)
    for number in range(4):
        if number == 3:
            assert expected(opt)
            REGROUPINGS[regrouping](opt.param_groups)
            old_weights = [p.detach().clone() for p in params]
        for half in (opt.first_step, opt.second_step):
            for p in params:
                p.grad = torch.ones_like(p)
            half()
    stay = [torch.equal(p, old) for p, old in zip(params, old_weights, strict=True)]
    assert stay == ([False] * 3 if regrouping == "one group" else [False, True, True])


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
            assert number < 2 or expected(opt)
            for p in params:
                p.grad = None
            assert [ref() for ref in refs] == [None, None]


@pytest.mark.parametrize(("change", "has_gradients"), [("another entry", True), ("one entry less", False)])
def test_a_pass_that_does_not_read_the_state_counts_its_entries(change: str, has_gradients: bool) -> None:
    case = Case(True)
    CHANGES[change](case)
    assert (case.guard.gradients(case.groups, case.state, True, reads_state=False) is not None) is has_gradients
