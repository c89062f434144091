"""torch's classes around an optimizer, and loops and checkpoints of other SAM classes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import LBFGS, SGD
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from fastsam import FusedSAM, variants

# tests/optim shows each of these on every backend; here they are rows of docs/compatibility.md.
pytestmark = pytest.mark.slow

BATCHES = torch.randn(6, 8, 4, generator=torch.Generator().manual_seed(0))
OPTIONS = {"lr": 0.1, "momentum": 0.9}


class Loop:
    """A model and its optimizer, with a step in two halves."""

    def __init__(self, base: type[torch.optim.Optimizer] = SGD, rho: float | None = 0.3, **options: object) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        keywords: dict[str, Any] = {"rho": rho, **OPTIONS, **options}
        self.opt = FusedSAM(self.model.parameters(), base, **keywords)

    def loss(self, batch: Tensor) -> Tensor:
        return (self.model(batch) - 1).square().mean()

    def closure(self, batch: Tensor) -> Tensor:
        loss = self.loss(batch)
        loss.backward()
        return loss

    def step(self, batch: Tensor) -> Tensor:
        loss = self.closure(batch)
        self.opt.first_step(zero_grad=True)
        self.closure(batch)
        self.opt.second_step(zero_grad=True)
        return loss

    def train(self) -> Loop:
        for batch in BATCHES:
            self.step(batch)
        return self

    def assert_as(self, other_loop: Loop) -> None:
        torch.testing.assert_close(
            list(self.model.parameters()), list(other_loop.model.parameters()), rtol=1e-5, atol=1e-6
        )


@pytest.fixture
def process_group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.shows("torch", "micro-batches in both halves: the step of the whole batch", "works")
def test_micro_batches_in_both_halves() -> None:
    loop = Loop()
    for batch in BATCHES:
        for half in (loop.opt.first_step, loop.opt.second_step):
            for part in batch.chunk(2):
                (loop.loss(part) / 2).backward()
            half(zero_grad=True)
    loop.assert_as(Loop().train())


@pytest.mark.shows("torch", "micro-batches before `step(closure)`", "warning")
def test_micro_batches_before_a_closure_are_told() -> None:
    loop = Loop()
    with pytest.warns(UserWarning, match="run all of them inside the closure"):
        for batch in BATCHES:
            loop.opt.zero_grad()
            loop.closure(batch)
            loop.opt.step(lambda batch=batch: loop.closure(batch))


@pytest.mark.shows("torch", "`GradScaler`: unscaled and clipped before `scaler.step`", "works")
def test_a_scaler() -> None:
    loop, scaler, clip = Loop(), torch.amp.GradScaler("cpu", init_scale=1024.0), 0.05
    for batch in BATCHES:
        scaler.scale(loop.loss(batch)).backward()
        loop.opt.first_step(zero_grad=True)
        scaler.scale(loop.loss(batch)).backward()
        scaler.unscale_(loop.opt)
        nn.utils.clip_grad_norm_(loop.model.parameters(), clip)
        scaler.step(loop.opt)
        scaler.update()
        loop.opt.zero_grad()
    expected = Loop()
    for batch in BATCHES:
        expected.closure(batch)
        expected.opt.first_step(zero_grad=True)
        expected.closure(batch)
        nn.utils.clip_grad_norm_(expected.model.parameters(), clip)
        expected.opt.second_step(zero_grad=True)
    loop.assert_as(expected)


@pytest.mark.shows("torch", "`GradScaler`: `unscale_` before `first_step`; `scaler.step(opt, closure)`", "clear error")
def test_what_a_scaler_cannot_do() -> None:
    loop, scaler = Loop(), torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(loop.loss(BATCHES[0])).backward()
    with pytest.raises(RuntimeError, match="[Cc]losure"):
        scaler.step(loop.opt, lambda: loop.closure(BATCHES[0]))

    loop, scaler = Loop(), torch.amp.GradScaler("cpu", init_scale=1024.0)
    start = [p.detach().clone() for p in loop.model.parameters()]
    scaler.scale(loop.loss(BATCHES[0])).backward()
    scaler.unscale_(loop.opt)
    with pytest.raises(
        RuntimeError, match="unscale_.* before first_step"
    ):  # as the step ends, where it is the first with this scaler
        loop.opt.first_step(zero_grad=True)
        scaler.scale(loop.loss(BATCHES[0])).backward()
        scaler.step(loop.opt)
    assert all(map(torch.equal, loop.model.parameters(), start))


@pytest.mark.shows("torch", "`ZeroRedundancyOptimizer` as the base", "works")
@pytest.mark.usefixtures("process_group")
def test_state_among_ranks() -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    Loop(ZeroRedundancyOptimizer, optimizer_class=SGD).train().assert_as(Loop().train())


@pytest.mark.shows("torch", "`ZeroRedundancyOptimizer(optimizer_class=FusedSAM)`", "clear error")
@pytest.mark.usefixtures("process_group")
def test_a_part_of_the_parameters_is_refused() -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    with pytest.raises(TypeError, match="Put it inside: FusedSAM"):
        ZeroRedundancyOptimizer(Loop().model.parameters(), optimizer_class=FusedSAM, lr=0.1)


@pytest.mark.shows("torch", "`LBFGS` as the base", "clear error")
def test_many_closures_a_step_are_refused() -> None:
    with pytest.raises(ValueError, match="LBFGS calls a closure several times per step"):
        FusedSAM(Loop().model.parameters(), LBFGS, lr=0.1)


@pytest.mark.shows("torch", "`torch.compile` of the model, `step(closure)`", "works")
def test_a_compiled_model() -> None:
    loop = Loop()
    compiled_model = torch.compile(loop.model, backend="aot_eager")
    for batch in BATCHES:
        loop.opt.step(lambda batch=batch: (compiled_model(batch) - 1).square().mean().backward())
    loop.assert_as(Loop().train())


@pytest.mark.shows("torch", "`torch.compile` of a step with `step(closure)` (the graph breaks there)", "works")
def test_a_compiled_step_with_a_closure() -> None:
    torch._dynamo.reset()
    loop = Loop()
    step = torch.compile(lambda batch: loop.opt.step(lambda: loop.closure(batch)), backend="aot_eager")
    for batch in BATCHES:
        step(batch)
    loop.assert_as(Loop().train())


@pytest.mark.shows("the copied SAM class", "its `state_dict()`, which has no momentum", "warning")
def test_a_checkpoint_without_the_bases_state_is_told() -> None:
    loop = Loop()
    params = list(loop.model.parameters())
    (group,) = SGD(params, **OPTIONS).state_dict()["param_groups"]
    state = {i: {"old_p": p.detach().clone()} for i, p in enumerate(params)}
    state_dict = {"state": state, "param_groups": [{**group, "rho": 0.3, "adaptive": False}]}
    with pytest.warns(UserWarning, match=r"base_optimizer\.state_dict\(\)"):
        loop.opt.load_state_dict(state_dict)


@pytest.mark.shows("the copied SAM class", "`base_optimizer.state_dict()`: momentum goes on", "works")
def test_the_bases_checkpoint_goes_on() -> None:
    expected, loop = Loop(), Loop()
    for batch in BATCHES[:3]:
        expected.step(batch)
    loop.model.load_state_dict(expected.model.state_dict())
    base = SGD(loop.model.parameters(), **OPTIONS)
    base.load_state_dict(
        {**expected.opt.base_optimizer.state_dict(), "param_groups": base.state_dict()["param_groups"]}
    )
    loop.opt.load_state_dict(base.state_dict())
    for batch in BATCHES[3:]:
        expected.step(batch)
        loop.step(batch)
    loop.assert_as(expected)


@pytest.mark.shows("Composer's `SAM`", "`interval=k` is `interval=k`: one step in k perturbs", "works")
@pytest.mark.parametrize("interval", [2, 3])
def test_an_interval(interval: int) -> None:
    """Compare with the peer's rule: a step perturbs if (t + 1) % interval == 0, counted from 0.

    FusedSAM perturbs in the first of `interval` steps, so the peer begins one step earlier.
    """
    loop, expected = Loop(variant=variants.SAM(rho=0.3, interval=interval), rho=None), Loop()
    base = SGD(expected.model.parameters(), **OPTIONS)
    params = list(expected.model.parameters())
    for t, batch in enumerate(BATCHES, interval - 1):
        if loop.opt.perturbs:
            loop.closure(batch)
            loop.opt.first_step(zero_grad=True)
        loop.closure(batch)
        loop.opt.step()
        loop.opt.zero_grad()

        expected.closure(batch)
        old_weights = [p.detach().clone() for p in params]
        if (t + 1) % interval == 0:
            grads = [p.grad.clone() for p in params]
            norm = torch.stack([g.norm() for g in grads]).norm()
            with torch.no_grad():
                for p, g in zip(params, grads):
                    p.add_(g, alpha=float(0.3 / (norm + 1e-12)))
            base.zero_grad()
            expected.closure(batch)
            with torch.no_grad():
                for p, w in zip(params, old_weights):
                    p.copy_(w)
        base.step()
        base.zero_grad()
    loop.assert_as(expected)


@pytest.mark.shows("torch", "an average of the weights after each step (EMA)", "works")
@pytest.mark.parametrize("variant", [None, variants.MSAM(0.3)], ids=["SAM", "MSAM"])
def test_an_average_of_the_weights(variant: variants.SAM | None) -> None:
    """The average has unperturbed weights. A one-pass variant has them in evaluation."""
    loop = Loop() if variant is None else Loop(rho=None, variant=variant)
    average = AveragedModel(loop.model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    expected: list[Tensor] = []
    for batch in BATCHES:
        if variant is None:
            loop.step(batch)
        else:
            loop.closure(batch)
            loop.opt.step()
            loop.opt.zero_grad()
        with loop.opt.evaluating():
            average.update_parameters(loop.model)
            weights = [p.detach().clone() for p in loop.model.parameters()]
        expected = [0.5 * e + 0.5 * w for e, w in zip(expected or weights, weights, strict=True)]
    torch.testing.assert_close(list(average.module.parameters()), expected, rtol=1e-5, atol=1e-6)
    perturbed = [p.detach() for p in loop.model.parameters()]
    assert all(map(torch.equal, perturbed, weights)) is (variant is None)
