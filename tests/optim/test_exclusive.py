"""`FusedSAM(exclusive=True)`: the same bits with less traffic, and every parameter in its own memory when a step is
over, however it ends."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from fastsam import FusedSAM
from fastsam.backends import Backend
from fastsam.optim import exclusive as exchange
from tests.helpers.interrupting import KERNELS, PACKAGE, Interrupt, Tracer
from tests.helpers.sam_cases import (
    ADAM,
    BASES,
    HALF,
    SGD,
    SHAPES,
    Model,
    first_half,
    halves,
    native,
    places,
    second_half,
    train,
)
from tests.helpers.sam_oracle import backward, copies, landscape, make_parameters, same_bits

pytestmark = pytest.mark.usefixtures("poisoned_memory", "worth")


@pytest.fixture
def worth(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small tensors, which are quick to test with, are exchanged too; with `both_ways` also none."""
    monkeypatch.setattr(exchange, "WORTH", getattr(request, "param", 0))


both_ways = pytest.mark.parametrize("worth", [0, 1 << 40], ids=["exchanged", "in place"], indirect=True)


# --- the same bits as without ---


@pytest.mark.parametrize("adaptive", [False, True], ids=["sam", "asam"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, HALF])
@pytest.mark.parametrize("name", BASES)
def test_bits_are_those_of_an_ordinary_step(name: str, dtype: torch.dtype, adaptive: bool, backend: Backend) -> None:
    base, options = BASES[name]
    model, other = Model(dtype, backend.device), Model(dtype, backend.device)
    kept = places(model.params)
    settings = {"rho": 0.3, "adaptive": adaptive, "backend": backend.name, **options}
    ours = FusedSAM(model.params, base, exclusive=True, **settings)
    plain = FusedSAM(other.params, base, **settings)
    for step in range(3):
        first_half(ours, model.params, step)
        first_half(plain, other.params, step)
        assert same_bits(model.params, other.params), "the perturbed point"
        for p in (model.params[step], other.params[step]):
            p.requires_grad_(False)  # none in this second pass, and none in the next first one
        second_half(model, ours, step)
        second_half(other, plain, step)
        assert same_bits(model.params, other.params) and places(model.params) == kept
        for p in (model.params[step - 1], other.params[step - 1]):
            p.requires_grad_(True)
    assert same_bits([ours.grad_norm], [plain.grad_norm])


@native
@pytest.mark.parametrize("groups", [1, 2])
def test_weights_are_exchanged_and_keep_their_memory(groups: int) -> None:
    params = make_parameters(SHAPES, torch.float32)
    opt = FusedSAM(
        [{"params": params[i::groups]} for i in range(groups)], SGD, lr=0.1, momentum=0.9, rho=0.2, exclusive=True
    )
    kept, memory, before = places(params), [p.detach() for p in params], copies(params)
    first_half(opt, params)
    assert all(p.data_ptr() != at for p, at in zip(params, kept, strict=True) if p.numel())
    assert same_bits(memory, before) and not same_bits(params, before)
    backward(params, 0)
    opt.second_step()
    assert places(params) == kept and same_bits(memory, params) and not same_bits(params, before)


@pytest.mark.parametrize("dtypes", [(torch.float32, torch.float64), (torch.float32, HALF)], ids=str)
def test_several_dtypes_take_the_ordinary_way(dtypes: tuple[torch.dtype, ...], backend: Backend) -> None:
    def trained(exclusive: bool) -> list[nn.Parameter]:
        params = [make_parameters([(5, 3)], dtype, backend.device, seed=i)[0] for i, dtype in enumerate(dtypes)]
        opt = FusedSAM(params, ADAM, lr=0.1, backend=backend.name, exclusive=exclusive)
        for step in range(3):
            halves(opt, params, step)
        return params

    assert same_bits(trained(True), trained(False))


@native
def test_a_profiler_may_come_between_the_passes() -> None:
    """The passes are then made by torch's calls, in the first pass without an exchange."""
    results = []
    for exclusive in (True, False):
        params = make_parameters(SHAPES, torch.float32)
        opt = FusedSAM(params, SGD, lr=0.1, momentum=0.9, rho=0.2, exclusive=exclusive)
        for step in range(4):
            with profile(activities=[ProfilerActivity.CPU]) if step == 1 else nullcontext():
                first_half(opt, params, step)
            with profile(activities=[ProfilerActivity.CPU]) if step == 2 else nullcontext():
                backward(params, step)
                opt.second_step()
        results.append(params)
    assert same_bits(*results)


# --- every end of a step ---


def closure_that_raises(params: list[nn.Parameter], call: int) -> Callable[[], Tensor]:
    calls = []

    def closure() -> Tensor:
        calls.append(1)
        loss = landscape(params, 0)
        loss.backward()
        if len(calls) == call:
            raise Interrupt
        return loss

    return closure


def ends(opt: FusedSAM, params: list[nn.Parameter]) -> dict[str, Callable[[], Any]]:
    def restored() -> None:
        first_half(opt, params)
        opt.restore()

    def looked_at() -> None:
        backward(params, 0)
        with opt.perturbed():
            pass

    def unusable() -> None:
        first_half(opt, params)
        params[0].grad = torch.zeros(5, 3).to_sparse()
        with pytest.raises(RuntimeError, match="sparse"):
            opt.second_step()

    def not_finite() -> None:
        opt.check_finite = True
        first_half(opt, params)
        params[0].grad = torch.full((5, 3), torch.nan)
        opt.second_step()

    def scaled() -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        scaler.scale(landscape(params, 0)).backward()
        opt.first_step(zero_grad=True)
        scaler.scale(landscape(params, 0) * torch.inf).backward()
        scaler.step(opt)

    def raising() -> None:
        with pytest.raises(Interrupt):
            opt.step(closure_that_raises(params, 2))

    return {f.__name__: f for f in (restored, looked_at, unusable, not_finite, scaled, raising)}


@both_ways
@pytest.mark.parametrize("name", BASES)
@pytest.mark.parametrize("end", ends(None, []))  # type: ignore[arg-type]
def test_a_step_without_an_update_leaves_everything(end: str, name: str) -> None:
    params = make_parameters(SHAPES, torch.float32)
    opt = FusedSAM(params, BASES[name][0], rho=0.2, exclusive=True, **BASES[name][1])
    halves(opt, params)
    kept, before = places(params), copies(params)
    ends(opt, params)[end]()
    assert places(params) == kept and same_bits(params, before)
    opt.zero_grad()
    halves(opt, params, 1)
    assert places(params) == kept and not same_bits(params, before)


@native
@pytest.mark.parametrize(
    ("base", "each"), [(SGD, 5), *(pytest.param(b, 1, marks=pytest.mark.slow) for b in (SGD, torch.optim.RMSprop))]
)
def test_interrupted_at_any_line(base: type, each: int) -> None:
    """Wholly made or not made, and every parameter in its own memory."""

    def run(at: int | None) -> tuple[Tracer, list[Tensor], list[Tensor], bool]:
        params = make_parameters([(5, 3), (4,)], torch.float32)
        opt = FusedSAM(params, base, lr=0.1, momentum=0.9, rho=0.2, exclusive=True)
        halves(opt, params)
        kept, before = places(params), copies(params)
        with Tracer(at, (PACKAGE, KERNELS)) as tracer, suppress(Interrupt):
            opt.step(closure_that_raises(params, 3))
        return tracer, before, copies(params), places(params) == kept

    whole, _, updated, _ = run(None)
    assert whole.lines > 100
    for at in range(0, whole.lines, each):
        tracer, before, after, at_home = run(at)
        assert at_home and (same_bits(after, before) or same_bits(after, updated)), tracer.where


# --- what happens between the passes ---


@both_ways
@pytest.mark.parametrize("name", BASES)
@pytest.mark.parametrize("how", ["deepcopy", "pickle", "state_dict"])
def test_copies_in_the_middle_of_a_step_go_on_alike(how: str, name: str) -> None:
    base, options = BASES[name]
    model = Model()
    opt = FusedSAM(model.parameters(), base, rho=0.2, exclusive=True, **options)
    train(model, opt, range(2))
    first_half(opt, model.params, 2)
    if how == "state_dict":
        other = Model(seed=1)
        other_opt = FusedSAM(other.parameters(), base, rho=0.2, exclusive=True, **options)
        other.load_state_dict(model.state_dict())
        other_opt.load_state_dict(opt.state_dict())
    else:
        other, other_opt = (
            copy.deepcopy((model, opt)) if how == "deepcopy" else pickle.loads(pickle.dumps((model, opt)))
        )
    for m, o in ((model, opt), (other, other_opt)):
        second_half(m, o, 2)
        train(m, o, range(3, 5))
    assert same_bits(model.params, other.params)


@both_ways
@pytest.mark.parametrize("what", ["group", "dtype", "moved", "half moved"])
def test_changes_in_the_middle_of_a_step(what: str) -> None:
    """A parameter that somebody moves has left the exchange: its unperturbed weights follow it."""
    results = []
    for exclusive in (True, False):
        model = Model()
        opt = FusedSAM(model.params, SGD, lr=0.1, momentum=0.9, rho=0.2, exclusive=exclusive)
        train(model, opt, range(2))
        first_half(opt, model.params, 2)
        added = make_parameters([(3,)], torch.float32)
        if what == "group":
            opt.add_param_group({"params": added, "lr": 0.3})
        elif what == "dtype":
            model.double()
        else:
            for p in model.params[: 1 if what == "half moved" else 3]:
                p.data = p.data.clone()
        opt.zero_grad()
        second_half(model, opt, 2)
        train(model, opt, range(3, 5))
        results.append(model.params)
    assert same_bits(*results)


@both_ways
def test_parameters_that_the_model_gave_up_are_noticed() -> None:
    """Whatever the exchange keeps of them, nobody else refers to them."""
    model = nn.Linear(3, 2)
    opt = FusedSAM(model.parameters(), SGD, lr=0.1, exclusive=True)
    for step in range(2):
        halves(opt, list(model.parameters()), step)
    model.load_state_dict({name: torch.ones_like(w) for name, w in model.state_dict().items()}, assign=True)
    with pytest.raises(RuntimeError, match=r"nobody but this optimizer refers to its parameters \[0, 1\]"):
        opt.first_step()


@native
def test_a_graph_of_the_other_point_is_refused() -> None:
    """What autograd saved of the weights is not silently replaced by the exchange."""
    w = nn.Parameter(torch.ones(3))
    opt = FusedSAM([w], SGD, lr=0.1, exclusive=True)
    loss = (w * w.exp()).sum()
    loss.backward(retain_graph=True)
    opt.first_step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    loss = (w * w.exp()).sum()
    loss.backward(retain_graph=True)
    opt.second_step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
