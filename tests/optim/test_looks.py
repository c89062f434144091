"""The look at parameters, gradients and state with which each pass begins (`fastsam.optim.tensor_table`).

These promises have their tests in this file or in the file that is named:

- A change after steady steps is seen: the step is the step of a fresh copy, or the same error.
  `test_a_change_after_steady_steps_is_seen`, with the rows of `CHANGES`.
- Replaced heads are an error, parameters that only the optimizer has are none. `test_changes.py`:
  `test_assigned_parameters_are_noticed`, `test_parameters_that_are_the_optimizers_own_are_not_dead`.
- Moved and converted parameters, and `.data =`. `CHANGES`, and `test_changes.py`: `test_moving_to_another_device`.
- Other shapes and orders at the same address, and freed memory, with torch's guards and without.
  `test_same_address.py`.
- Shared memory is an error, and memory that others hold is not swapped. `test_changes.py`:
  `test_data_that_comes_to_overlap_is_an_error`, `test_exclusive.py`.
- Frozen and unfrozen parameters. `CHANGES`, `test_frozen.py`.
- Swaps of FSDP. `test_sharded.py`.
- Groups and state that a user changes. `CHANGES`, `test_copies.py`.
- A missing gradient or a frozen parameter costs no call.
  `test_a_steady_step_makes_as_many_calls_with_a_missing_gradient_or_a_frozen_parameter`.
- No gradient outlives its step. `test_a_step_keeps_no_gradient_alive`.
"""

import copy
import sys
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fastsam import MSAM, FusedSAM
from fastsam.backends import Backend
from tests.helpers.crosses import one_in
from tests.helpers.interrupting import KERNELS, PACKAGE
from tests.helpers.sam_cases import BASES
from tests.helpers.sam_oracle import copies, same_bits

SHAPES = [(3, 4), (1,), (), (2, 1, 3), (0,), (4, 4)]


class Course:
    """A training of six small parameters, made of passes with random gradients."""

    def __init__(self, base: str = "sgd", dtypes: tuple[torch.dtype, ...] = (torch.float32,), **options: Any) -> None:
        self.generator = torch.Generator().manual_seed(0)
        tensors = [self.random(shape, dtypes[i % len(dtypes)]) for i, shape in enumerate(SHAPES)]
        self.params = [nn.Parameter(tensor) for tensor in tensors]
        cls, base_options = BASES[base]
        self.absent: set[int] = set()
        groups = [{"params": self.params[:4]}, {"params": self.params[4:], "rho": 0.2}]
        self.opt = FusedSAM(groups, cls, **{**base_options, **options})

    def random(self, shape: Any, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(shape, generator=self.generator).to(dtype)

    def backward(self) -> None:
        for i, p in enumerate(self.params):
            p.grad = None if i in self.absent else self.random(p.shape, p.dtype).to(p.device)

    def halves(self) -> list[Callable[[], object]]:
        return [self.opt.step] if isinstance(self.opt.variant, MSAM) else [self.opt.first_step, self.opt.second_step]

    def step(self) -> None:
        for k in range(len(self.halves())):
            self.backward()
            self.halves()[k]()

    def __deepcopy__(self, memo: Any) -> "Course":
        other = object.__new__(Course)
        other.params, other.opt = copy.deepcopy((self.params, self.opt))
        other.generator, other.absent = torch.Generator(), set(self.absent)
        other.generator.set_state(self.generator.get_state())
        return other


def set_grad(i: int, make: Callable[[Tensor], Tensor | None]) -> Callable[[Course], None]:
    def change(course: Course) -> None:
        grad, course.params[i].grad = course.params[i].grad, None
        assert grad is not None
        course.params[i].grad = make(grad)

    return change


def other_data(make: Callable[[Tensor], Tensor], i: int = 0) -> Callable[[Course], None]:
    return lambda c: setattr(c.params[i], "data", make(c.params[i].data))


def set_entry(name: str, make: Callable[[Tensor], Tensor]) -> Callable[[Course], None]:
    def change(course: Course) -> None:
        entry = course.opt.state[course.params[0]]
        entry[name] = make(entry[name])

    return change


def grow(course: Course, add: Callable[[FusedSAM, nn.Parameter], Any]) -> None:
    course.params.append(nn.Parameter(course.random((3,))))
    add(course.opt, course.params[-1])
    course.params[-1].grad = course.random((3,))


def regroup(course: Course) -> None:
    first, second = (group["params"] for group in course.opt.param_groups)
    second.insert(0, first.pop())


CHANGES: dict[str, Callable[[Course], Any]] = {
    "nothing": lambda c: None,
    "no gradient": set_grad(0, lambda g: None),
    "a gradient of a subclass": set_grad(0, lambda g: nn.Parameter(g)),
    "a sparse gradient": set_grad(0, lambda g: g.to_sparse()),
    "a gradient in another order": set_grad(0, lambda g: g.t().contiguous().t()),
    "a gradient in another order at its address": set_grad(5, lambda g: g.t()),
    "a gradient that is expanded": set_grad(0, lambda g: g[:1].expand(3, 4)),
    "a gradient with its sign pending": set_grad(1, lambda g: torch._neg_view(g)),
    "a gradient without memory": set_grad(0, lambda g: torch._efficientzerotensor(3, 4)),
    "a freed gradient": set_grad(0, lambda g: (g.untyped_storage().resize_(0), g)[1]),
    "a parameter elsewhere": other_data(torch.clone),
    "a parameter in another order": other_data(lambda w: w.t(), 5),
    "a parameter with gaps": other_data(lambda w: torch.stack([w, w], -1)[..., 0]),
    "a parameter of another dtype": lambda c: [other_data(torch.Tensor.double)(c), set_grad(0, Tensor.double)(c)],
    "a frozen parameter": lambda c: c.params[0].requires_grad_(False),
    "one parameter less": lambda c: c.opt.param_groups[0]["params"].remove(c.params[0]),
    "one parameter more": lambda c: grow(c, lambda opt, p: opt.param_groups[1]["params"].append(p)),
    "another group": regroup,
    "one group": lambda c: c.opt.param_groups[0]["params"].extend(c.opt.param_groups.pop()["params"]),
    "a new group": lambda c: grow(c, lambda opt, p: opt.add_param_group({"params": [p], "lr": 0.3})),
    "an emptied state": lambda c: c.opt.state.clear(),
    "one entry less": lambda c: c.opt.state.pop(c.params[0]),
    "an entry of the user": lambda c: c.opt.state.__setitem__("note", {}),  # type: ignore[index]
    "another momentum": set_entry("momentum_buffer", torch.ones_like),
    "another learning rate": lambda c: c.opt.param_groups[1].update(lr=0.3),
    "a learning rate as a tensor": lambda c: c.opt.param_groups[0].update(lr=torch.tensor(0.3)),
    "a larger rho": lambda c: c.opt.param_groups[0].update(rho=0.5),
}  # fmt: skip
WAYS: dict[str, dict[str, Any]] = {
    "two passes": {}, "two dtypes": {"dtypes": (torch.float32, torch.bfloat16)}, "one pass": {"variant": MSAM()},
}  # fmt: skip


def outcome(change: str, half: int, is_fresh: bool, absent: set[int], **options: Any) -> tuple[list[Tensor], str]:
    """Return the weights after five steps, with a change before a pass of the fourth, and the error of that pass. If
    `is_fresh` is True, a copy goes on from there that knows of no pass before."""
    course, error = Course(**options), ""
    course.absent = absent
    for _ in range(3):
        course.step()
    for k in range(len(course.halves())):
        if k == half and is_fresh:
            course = copy.deepcopy(course)
        course.backward()
        if k == half:
            CHANGES[change](course)
        try:
            course.halves()[k]()
        except (RuntimeError, TypeError, ValueError) as raised:
            error = f"{type(raised).__name__}: {raised}"
            break
    weights = copies(course.params)
    if not error:
        course.step()
    return weights + copies(course.params), error


@pytest.mark.parametrize(("half", "change", "way", "absent"), one_in(2, [0, 1], CHANGES, WAYS, [set(), {1}]))
def test_a_change_after_steady_steps_is_seen(
    half: int, change: str, way: str, absent: set[int], backend: Backend
) -> None:
    if (way == "one pass" and half) or (absent and "sign pending" in change):
        pytest.skip("no such pass, or no such gradient")
    if change == "one parameter less" and (way == "one pass" or half):
        pytest.skip("a copy does not know the saved weights of a parameter that left before its first step")
    if change == "a parameter in another order" and half:
        pytest.skip("a second pass finds other addresses and gradients, and no other order at the same address")
    results = [outcome(change, half, is_fresh, absent, backend=backend.name, **WAYS[way]) for is_fresh in (False, True)]
    (weights, error), (fresh_weights, fresh_error) = results
    assert error == fresh_error
    assert same_bits(weights, fresh_weights)


def calls_of_a_step(course: Course) -> int:
    """Return the number of Python functions of the package that a step calls, after some steps."""
    for _ in range(6):
        course.step()
    count = 0

    def profile(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        name = frame.f_code.co_name
        in_package = frame.f_code.co_filename.startswith((PACKAGE, KERNELS))
        count += event == "call" and in_package and not name.startswith("<")  # Python 3.12 inlines comprehensions

    for k in range(len(course.halves())):
        course.backward()
        sys.setprofile(profile)
        try:
            course.halves()[k]()
        finally:
            sys.setprofile(None)
    return count


@pytest.mark.parametrize("way", ["two passes", "two dtypes"])
def test_a_steady_step_makes_as_many_calls_with_a_missing_gradient_or_a_frozen_parameter(way: str) -> None:
    full, missing, frozen = (Course(**WAYS[way]) for _ in range(3))
    missing.absent = frozen.absent = {0}
    frozen.params[0].requires_grad_(False)
    assert calls_of_a_step(missing) == calls_of_a_step(frozen) == calls_of_a_step(full) > 0


@pytest.mark.parametrize("absent", [set(), {0}], ids=["all gradients", "one is missing"])
@pytest.mark.parametrize("way", WAYS)
def test_a_step_keeps_no_gradient_alive(way: str, absent: set[int], backend: Backend) -> None:
    course = Course(backend=backend.name, **WAYS[way])
    course.absent = absent
    for _ in range(4):
        for k in range(len(course.halves())):
            course.backward()
            references = [weakref.ref(p.grad) for p in course.params if p.grad is not None]
            course.halves()[k]()
            course.opt.zero_grad()
            assert {reference() for reference in references} == {None}
