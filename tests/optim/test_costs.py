"""Costs of a step apart from its arithmetic: calls of kernels, and memory. Direct calls give the dispatcher's
results."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from bench import memory
from bench.contenders import Contender, OptimizerStepper
from fastsam import MSAM, FusedSAM, backends
from fastsam_kernels import direct_calls
from tests.helpers.sam_cases import Prepared

native = pytest.mark.skipif(
    backends.select("auto", torch.device("cpu"), torch.float32).name != "native", reason="no compiled CPU kernels here"
)
HALF = torch.bfloat16


def model(tensors: int, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(3 + i % 5, 7) for i in range(tensors)]
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def step(opt: FusedSAM, params: Sequence[Tensor], number: int = 0) -> None:
    for half in (opt.first_step, opt.second_step):
        generator = torch.Generator().manual_seed(number)
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
        half()


# --- kernels ---


@native
@pytest.mark.parametrize("base", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("tensors", [1, 20, 200])
def test_a_step_is_three_kernels_for_any_number_of_tensors(tensors: int, base: type[torch.optim.Optimizer]) -> None:
    params = model(tensors)
    opt = FusedSAM(params, base, lr=0.1)
    step(opt, params)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        step(opt, params, 1)
    names = sorted(e.name for e in profiler.events() if e.name.startswith("fastsam::"))
    assert names == ["fastsam::norm_", "fastsam::perturb_", "fastsam::update_"]


@native
def test_unobserved_it_is_two_calls_and_no_op_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    params, calls, real = model(20), [], direct_calls._function
    monkeypatch.setattr(direct_calls, "_function", lambda name: lambda *args: calls.append(name) or real(name)(*args))
    opt = FusedSAM(params, torch.optim.SGD, lr=0.1, momentum=0.9)
    step(opt, params)
    calls.clear()
    step(opt, params, 1)
    assert calls == ["norm_perturb", "update"]


@native
def test_a_step_of_one_pass_is_two_calls_that_copy_no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """The saved weights are updated where they are, and the parameters are written once, with the next perturbed
    point."""
    params, calls, real = model(20), [], direct_calls._function
    opt = FusedSAM(params, torch.optim.SGD, lr=0.1, momentum=0.9, variant=MSAM())

    def recorder(name: str) -> Any:
        return lambda *args: calls.append((name, args[-1])) or real(name)(*args)

    monkeypatch.setattr(direct_calls, "_function", recorder)
    for number in range(3):
        calls.clear()
        for p in params:
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(number))
        versions = [p._version for p in params]
        opt.step()
        assert number == 0 or [p._version for p in params] == [version + 1 for version in versions]
    assert calls == [("update", False), ("norm_perturb", False)]  # keeps no master, saves no weights


@native
def test_a_gradient_with_a_pending_sign_is_read_as_its_values() -> None:
    """The imaginary part of a conjugate: one element, contiguous, and the sign not yet changed in memory."""
    results = []
    for lazy in (True, False):
        p = nn.Parameter(torch.tensor([1.0]))
        opt = FusedSAM([p], lr=0.1)
        for half in (opt.first_step, opt.second_step):
            grad = torch.tensor([1 + 2j]).conj().imag
            assert grad.is_neg()
            p.grad = grad if lazy else grad.resolve_neg()
            half()
        results.append(p.item())
    assert results[0] == results[1] > 1.0


@native
def test_capturable_changes_nothing_on_a_cpu() -> None:
    """The step count is on the device in any case."""
    weights = []
    for capturable in (False, True):
        params = model(3)
        opt = FusedSAM(params, torch.optim.AdamW, lr=0.1, capturable=capturable)
        for number in range(3):
            step(opt, params, number)
        assert all(float(opt.state[p]["step"]) == 3.0 and opt.state[p]["step"].device == p.device for p in params)
        weights.append([p.detach().clone() for p in params])
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))


# --- ASAM on half-precision weights ---


@pytest.mark.parametrize("name", ["native", "foreach", "reference"])
@pytest.mark.parametrize("dtype", [HALF, torch.float16])
def test_the_adaptive_norm_is_that_of_the_master_copy(dtype: torch.dtype, name: str) -> None:
    """The norm of the rounded weights would differ by up to a rounding of the weights, 2^-9 for bfloat16."""
    if backends.select("auto", torch.device("cpu"), dtype).name != "native" and name == "native":
        pytest.skip("no compiled CPU kernels here")
    p = nn.Parameter(torch.full((8,), 1.0).to(dtype))
    opt = FusedSAM([p], torch.optim.SGD, rho=0.05, adaptive=True, lr=1.0, backend=name)
    for half in (opt.first_step, opt.second_step):  # moves the master copies by less than a rounding of the weights
        p.grad = torch.full_like(p, 2.0**-13)
        half()
    master = opt.state_dict()["state"][0]["master"].double()
    assert not torch.equal(master, p.detach().double())
    p.grad = torch.arange(1.0, 9.0).to(dtype)
    expected = (master.abs() * p.grad.double()).norm()
    opt.first_step()
    torch.testing.assert_close(opt.grad_norm, expected, rtol=1e-6, atol=0.0)
    opt.restore()
    with torch.no_grad():
        p.mul_(2.0)  # written by the user: from now on the master copy is this
    opt.first_step()
    torch.testing.assert_close(opt.grad_norm, (2.0 * p.grad.double()).norm(), rtol=1e-6, atol=0.0)


# --- memory ---

# Bytes per parameter at the peak of a step, beyond weights and gradients; docs/memory.md has the same table.
MEMORY: list[tuple[str, torch.dtype, float, dict[str, Any]]] = [
    ("SGD", torch.float32, 4, {}), ("SGD", torch.float32, 8, {"momentum": 0.9}),
    ("SGD", torch.float32, 8, {"momentum": 0.9, "adaptive": True}),
    ("SGD", torch.float32, 8, {"momentum": 0.9, "skip_nonfinite": True}), ("AdamW", torch.float32, 12, {}),
    ("SGD", torch.float64, 16, {"momentum": 0.9}), ("SGD", HALF, 4, {}), ("SGD", HALF, 8, {"momentum": 0.9}),
    ("AdamW", HALF, 12, {}), ("SGD", HALF, 12, {"momentum": 0.9, "adaptive": True}),
]  # fmt: skip


@native
@pytest.mark.parametrize(
    ("base", "dtype", "expected", "options"),
    [pytest.param(*case, marks=[] if i % 2 else pytest.mark.slow) for i, case in enumerate(MEMORY)],
    ids=str,
)
def test_peak_memory_per_parameter(base: str, dtype: torch.dtype, expected: float, options: dict[str, Any]) -> None:
    weights = [torch.randn(500, 400).to(dtype), torch.randn(400).to(dtype)]

    def build(initial: Sequence[Tensor]) -> OptimizerStepper:
        return OptimizerStepper(initial, lambda p: FusedSAM(p, getattr(torch.optim, base), lr=0.1, **options))

    peak = memory.peak_extra_bytes(Contender("", "", build), weights, Prepared(weights))  # type: ignore[arg-type]
    assert peak / sum(w.numel() for w in weights) == pytest.approx(expected, rel=0.03)
