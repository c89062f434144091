"""Contracts of every training: steps that do not come to their end, options and surroundings."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from tests.helpers.interrupted_steps import STYLES, Plan
from tests.helpers.interrupting import Interrupt, Tracer
from tests.helpers.sam_cases import places
from tests.helpers.sam_oracle import copies, same_bits
from tests.helpers.trainings import Spec, by_hand, every_training, loss_of, outcome
from tests.helpers.variant_cases import Training

pytestmark = pytest.mark.usefixtures("poisoned_memory", "small_exchanges")


# --- steps that do not come to their end ---


@pytest.mark.usefixtures("no_collection")
@every_training
@pytest.mark.parametrize("style", STYLES)
def test_a_step_interrupted_at_any_line_is_made_or_not_made(spec: Spec, style: str) -> None:
    """Weights and state, wherever it is; every parameter in its own memory; and the training goes on from there."""
    if not spec.has_kernels or (spec.one_pass and style in ("in_context", "look")):
        pytest.skip("a base interrupted in its own step leaves what it leaves; one pass has no halves")
    warm = 2 if spec.one_pass else list(STYLES).index(style) % 3
    plan = Plan(spec, style, warm)
    lines = plan.lines()
    assert lines > 50
    last = lines - lines // 20  # a step may have fewer lines than the counted one
    for line in range(warm, last, max(1, lines // 3)):
        assert plan.interrupted(Tracer(line, plan.folders))


def restore(training: Training) -> None:
    training.backward(9)
    training.opt.first_step()
    training.opt.restore()


def looked_at(training: Training) -> None:
    training.backward(9)
    old_weights = copies(training.params)
    with pytest.raises(KeyError), training.opt.perturbed():
        assert same_bits(old_weights, training.params) is not training.opt.perturbs
        training.backward(9)
        raise KeyError


def raising_in(pass_: int) -> Callable[[Training], None]:
    def end(training: Training) -> None:
        calls: list[int] = []

        def closure() -> Tensor:
            calls.append(1)
            if len(calls) > pass_ or not training.opt.perturbs:
                raise Interrupt
            value = loss_of(training, 9)
            value.backward()
            return value

        with pytest.raises(Interrupt):
            training.opt.step(closure)

    return end


def unusable(spoil: Callable[[Tensor], Tensor], first: bool = False) -> Callable[[Training], None]:
    """Give one of the passes a gradient that no step can use."""

    def end(training: Training) -> None:
        training.backward(9)
        if training.opt.perturbs and not first:
            training.opt.first_step()
            training.backward(9)
        grad, training.params[0].grad = training.params[0].grad, None
        training.params[0].grad = spoil(grad)
        with pytest.raises(RuntimeError, match="sparse|storage was freed|storage of size 0|not allocated"):
            training.opt.first_step() if training.opt.perturbs and first else training.opt.second_step()

    return end


def free_data(grad: Tensor) -> Tensor:
    grad.untyped_storage().resize_(0)
    return grad


def raise_in_hook(training: Training) -> None:
    handle = training.opt.register_step_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        training.steps(range(9, 10))
    with pytest.raises(ZeroDivisionError):
        by_hand(training, 9, zero_grad=False)
    handle.remove()


ENDS: dict[str, Callable[[Training], None]] = {
    "restored": restore, "looked at": looked_at, "raising": raising_in(0), "raising later": raising_in(1),
    "sparse": unusable(Tensor.to_sparse), "freed": unusable(free_data), "freed first": unusable(free_data, first=True),
    "hooked": raise_in_hook,
}  # fmt: skip


@every_training
@pytest.mark.parametrize("end", ENDS)
def test_a_step_without_an_update_leaves_everything(spec: Spec, end: str) -> None:
    """Weights, state and memory; and the training goes on as if it had never begun."""
    if spec.one_pass and end in ("restored", "looked at"):
        pytest.skip("one pass has no halves")
    if end.startswith("freed") and not spec.has_kernels:
        pytest.skip("torch's own step reads the gradient")
    start = 2 + list(ENDS).index(end) % 2  # with an interval, one of two steps does not perturb
    training = spec.make(start)
    addresses, old_outcome = places(training.params), outcome(training)
    ENDS[end](training)
    assert places(training.params) == addresses and same_bits(old_outcome, outcome(training))
    assert not training.opt.is_perturbed
    training.opt.zero_grad()
    training.steps(range(start, start + 2))
    assert spec.options == "stochastic" or same_bits(training.params, spec.make(start + 2).params)


# --- options and surroundings ---


class PassThroughMode(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


SURROUNDINGS: dict[str, Callable[[], Any]] = {
    "a mode": PassThroughMode,
    "a profiler": lambda: profile(activities=[ProfilerActivity.CPU]),
    "no guards": lambda: mock.patch("fastsam.optim.tensor_table.TensorGuards", None),  # torch's own, and private
    "float64": lambda: default_dtype(torch.float64),
    "float16": lambda: default_dtype(torch.float16),
    "meta": lambda: torch.device("meta"),  # stands for a GPU: tensors that get there have no values on the CPU
}


@every_training
@pytest.mark.parametrize("name", SURROUNDINGS)
def test_surroundings_change_no_bit(spec: Spec, name: str) -> None:
    """Modes that see torch's calls, and torch's defaults; around the first pass and around the second."""
    if (name == "meta" and (spec.base == "rmsprop" or not spec.has_kernels)) or (
        name == "float64" and spec.base == "nadam"
    ):
        pytest.skip("torch makes its own counters on the default device, in the default dtype")
    training = spec.make()
    for t in range(4):
        training.opt.zero_grad()
        training.backward(t)
        if training.opt.perturbs:
            with SURROUNDINGS[name]() if t != 1 else nullcontext():
                training.opt.first_step(zero_grad=True)
            loss_of(training, t).backward()
        with SURROUNDINGS[name]() if t != 2 else nullcontext():
            training.opt.second_step()
            state_dict = training.opt.state_dict()
            if t == 2 and not spec.one_pass and spec.base != "nadam":  # torch's loading casts a part of its state
                training.opt.load_state_dict(state_dict)
    assert same_bits(training.params, spec.make(4).params)


@every_training
def test_exclusive_parameters_and_groups_change_no_bit(spec: Spec) -> None:
    """Groups with the same options, given by name or set later; memory that is exchanged, or not worth it; updates in
    the backward pass; and all parameters at home between the steps."""
    full_training = spec.make(4)
    option_sets: list[dict[str, Any]] = [{}]
    if not spec.one_pass:
        option_sets += [{"assume_no_alias": True}]
        if spec._replace(options="in backward").valid:
            option_sets += [{"assume_no_alias": True, "optimizer_in_backward": True}]
    for options in option_sets:
        training = spec.make(0, **options)
        addresses = places(training.params)
        for t in range(4):
            training.steps(range(t, t + 1)) if t % 2 else by_hand(training, t)
            assert places(training.params) == addresses, options
        assert same_bits(training.params, full_training.params), options
    groups = spec.make(0, groups=[[0], [1, 2]])
    groups.opt.param_groups[0]["lr"], lr = 0.0, groups.opt.param_groups[0]["lr"]
    groups.opt.param_groups[0]["lr"] = lr
    assert same_bits(groups.steps(range(4)).params, full_training.params)


@every_training
def test_a_group_that_is_added_leaves_the_others(spec: Spec) -> None:
    """Between two steps, and between the passes of one; it is trained with its own options."""
    for moment in ("idle",) if spec.one_pass else ("idle", "between"):
        training, new_param = spec.make(3), nn.Parameter(torch.ones(4, dtype=spec.dtype))
        if moment == "between":
            training.backward(3)
            training.opt.first_step(zero_grad=True)
        training.opt.add_param_group({"params": [new_param], "lr": 0.25})
        if moment == "between":
            loss_of(training, 3).backward()
            training.opt.second_step()
        training.steps(range(3 + (moment == "between"), 5))
        if spec.options != "stochastic":
            assert same_bits(training.params, spec.make(5).params), moment
        assert training.opt.state_dict()["param_groups"][1]["params"] == [3] and bool((new_param == 1).all())
        training.opt.zero_grad()
        for _ in range(1 + training.opt.perturbs):
            new_param.grad = torch.ones_like(new_param)
            training.opt.step() if training.opt.is_perturbed or not training.opt.perturbs else training.opt.first_step()
        with training.opt.evaluating():
            assert not bool((new_param == 1).any())
