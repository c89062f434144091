"""Training steps under torch.compile: the same numbers, and schedules that are followed."""

import itertools
import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from fastsam import FusedSAM, backend
from tests.helpers.pages import blocks
from tests.helpers.sam_oracle import landscape, make_parameters

BASES = {"sgd": (torch.optim.SGD, {"momentum": 0.9}), "adamw": (torch.optim.AdamW, {})}


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def losses(name: str, tensors: bool, compiler: Any, warm: int, zero_grad: bool = False) -> list[float]:
    """Return the losses of eight steps with a schedule of lr and rho. Steps after the first `warm` ones are compiled.
    If `zero_grad` is True, the halves clear the gradients."""
    base, options = BASES[name]
    params = make_parameters([(5, 3), (8,), (2, 3, 4, 4)], torch.float32)
    first = {"lr": 0.05, "rho": 0.1}
    opt = FusedSAM(params, base, **{n: torch.tensor(v) if tensors else v for n, v in first.items()}, **options)

    def clear() -> None:
        for p in () if zero_grad else params:
            p.grad = None

    def step() -> Tensor:
        clear()
        loss = landscape(params, 0)
        loss.backward()
        opt.first_step(zero_grad)
        clear()
        landscape(params, 0).backward()
        opt.second_step(zero_grad)
        return loss.detach()

    fast = compiler(step) if compiler else step
    results = []
    for i in range(8):
        for name, change_step, value in (("lr", 4, 0.01), ("rho", 6, 0.5)):
            if i == change_step and tensors:
                opt.param_groups[0][name].fill_(value)
            elif i == change_step:
                opt.param_groups[0][name] = value
        results.append(float((step if i < warm else fast)()))
    return results


USUAL = (("adamw", True, 2),)  # the other combinations are slow


@pytest.mark.parametrize(
    ("name", "tensors", "warm"),
    [
        pytest.param(*case, marks=[] if case in USUAL else [pytest.mark.slow])
        for case in itertools.product(BASES, (False, True), (0, 2))
    ],
)
def test_a_compiled_step_makes_the_same_steps(name: str, tensors: bool, warm: int) -> None:
    plain = losses(name, tensors, None, 8)
    fast = losses(name, tensors, lambda step: torch.compile(step, backend="aot_eager"), warm)
    torch.testing.assert_close(torch.tensor(fast), torch.tensor(plain), rtol=1e-5, atol=1e-5)
    assert len(set(plain)) == 8


def in_one_graph(name: str, zero_grad: bool) -> list[float]:
    torch._dynamo.reset()
    with torch._dynamo.config.patch(trace_autograd_ops=True):
        return losses(name, True, lambda step: torch.compile(step, backend="aot_eager", fullgraph=True), 2, zero_grad)


@pytest.fixture(scope="module")
def other_process() -> Iterator[ProcessPoolExecutor]:
    """Start a process, because tracing with `trace_autograd_ops` in torch 2.13 breaks graphs that are compiled
    later."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield pool


@pytest.mark.parametrize(("name", "zero_grad"), [("sgd", True), pytest.param("adamw", False, marks=pytest.mark.slow)])
def test_forward_backward_and_step_in_one_graph(name: str, zero_grad: bool, other_process: ProcessPoolExecutor) -> None:
    """After one ordinary step, which makes the buffers, and with lr and rho as tensors; with gradients cleared by the
    halves, and by the user."""
    if backend("cpu") != "native":
        pytest.skip("the reference reads its tables on the host; whole graphs need the compiled kernels")
    if not hasattr(torch._dynamo.config, "trace_autograd_ops"):
        pytest.skip("this torch cannot trace backward()")
    plain = losses(name, True, None, 8)
    fast = other_process.submit(in_one_graph, name, zero_grad).result()
    torch.testing.assert_close(torch.tensor(fast), torch.tensor(plain), rtol=1e-5, atol=1e-5)


def end_of_the_page(in_one_graph: bool) -> list[Tensor]:
    """Return the weights after the compiled step that docs/fused_sam.md shows."""
    first, *more_blocks = [block for block in blocks("docs/fused_sam.md") if block.language == "python"]
    (recipe,) = [block for block in more_blocks if "fullgraph=True" in block.code]
    compiler = partial(torch.compile, backend="aot_eager") if in_one_graph else lambda step, fullgraph: step
    torch.manual_seed(0)
    names: dict[str, Any] = {"__name__": "page"}
    with torch._dynamo.config.patch(trace_autograd_ops=False), mock.patch("torch.compile", compiler):
        first.run(names)
        recipe.run(names)
    return [p.detach() for p in names["model"].parameters()]


@pytest.mark.slow
@pytest.mark.skipif(backend("cpu") != "native", reason="whole graphs need the compiled kernels")
@pytest.mark.skipif(not hasattr(torch._dynamo.config, "trace_autograd_ops"), reason="torch cannot trace backward()")
def test_the_recipe_of_the_page(other_process: ProcessPoolExecutor) -> None:
    plain, fast = end_of_the_page(False), other_process.submit(end_of_the_page, True).result()
    torch.testing.assert_close(fast, plain, rtol=1e-5, atol=1e-6)


def test_a_model_compiled_before_its_optimizer() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))
    opt = FusedSAM(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
    compiled_model = torch.compile(model, backend="aot_eager")
    x = torch.randn(16, 4)

    def closure() -> Tensor:
        loss = compiled_model(x).square().mean()
        loss.backward()
        return loss

    first = opt.step(closure).item()
    for _ in range(10):
        last = opt.step(closure).item()
    assert last < first


def closure_losses(compiler: Callable[[Any], Any] | None) -> list[float]:
    """Return the losses of six steps with a closure; the first step is not compiled."""
    params = make_parameters([(5, 3), (8,)], torch.float32)
    opt = FusedSAM(params, torch.optim.SGD, lr=torch.tensor(0.05), rho=torch.tensor(0.1), momentum=0.9)

    def closure() -> Tensor:
        loss = landscape(params, 0)
        loss.backward()
        return loss

    def step() -> Tensor:
        return opt.step(closure).detach()

    fast = compiler(step) if compiler else step
    return [float((fast if i else step)()) for i in range(6)]


def test_a_closure_breaks_the_graph_and_makes_the_same_steps() -> None:
    """Also where torch traces backward passes: it would lose the gradients at the break, and nothing would be
    trained."""
    config = torch._dynamo.config
    if not hasattr(config, "trace_autograd_ops"):
        pytest.skip("this torch cannot trace backward()")
    plain = closure_losses(None)
    assert len(set(plain)) == 6
    with config.patch(trace_autograd_ops=True):
        assert closure_losses(lambda step: torch.compile(step, backend="eager")) == plain
        torch._dynamo.reset()
        with pytest.raises(Exception, match="_run_uncompiled"):
            closure_losses(lambda step: torch.compile(step, backend="eager", fullgraph=True))
