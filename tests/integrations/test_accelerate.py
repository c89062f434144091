"""Accelerate around FusedSAM: both halves of a step, accumulation, clipping, a GradScaler."""

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fastsam import FusedSAM
from fastsam.integrations.accelerate import unwrap_optimizer
from tests.helpers.libraries import library
from tests.helpers.sam_oracle import same_bits

accelerate = library("accelerate")

BATCHES = torch.randn(6, 8, 4, generator=torch.Generator().manual_seed(0))
CLIP = 0.05


def make_training(start: nn.Module | None = None) -> tuple[nn.Module, FusedSAM]:
    torch.manual_seed(0)
    model = copy.deepcopy(start) if start else nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    return model, FusedSAM(model.parameters(), torch.optim.SGD, rho=0.3, lr=0.1, momentum=0.9)


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch) - 1).square().mean()


def plain_loop(model: nn.Module, opt: FusedSAM, accumulation_steps: int) -> None:
    for batches in BATCHES.split(accumulation_steps):
        for second in (False, True):
            opt.zero_grad()
            for batch in batches:
                (loss_of(model, batch) / accumulation_steps).backward()
            if second:
                nn.utils.clip_grad_norm_(model.parameters(), CLIP)
                opt.second_step()
            else:
                opt.first_step()


@pytest.mark.shows("Accelerate", "`unwrap_optimizer`: both halves, accumulation, clipping", "works")
@pytest.mark.parametrize("accumulation_steps", [1, 3])
def test_the_steps_of_a_plain_loop(accumulation_steps: int) -> None:
    """The recipe of the page: all micro-batches, first_step, all of them again, step."""
    start, _ = make_training()
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=accumulation_steps)
    model, opt = accelerator.prepare(*make_training(start))
    sam = unwrap_optimizer(opt)
    schedule = accelerator.prepare(torch.optim.lr_scheduler.StepLR(sam, 1))

    def backward(batches: Sequence[Tensor]) -> None:
        for batch in batches[:-1]:
            with accelerator.no_sync(model):
                accelerator.backward(loss_of(model, batch))
        accelerator.backward(loss_of(model, batches[-1]))

    for batches in BATCHES.split(accumulation_steps):
        backward(batches)
        sam.first_step(zero_grad=True)
        backward(batches)
        accelerator.clip_grad_norm_(model.parameters(), CLIP)
        opt.step()
        opt.zero_grad()
    expected, plain = make_training(start)
    plain_loop(expected, plain, accumulation_steps)
    assert same_bits(list(model.parameters()), list(expected.parameters()))
    assert schedule is not None and sam is opt.optimizer
    assert all(p.grad is None for p in model.parameters())


def test_steps_before_sam_take_one_pass() -> None:
    """By the prepared optimizer's `step()` alone; the halves come with the first step that perturbs."""
    start, _ = make_training()
    ends = []
    for accelerator in (accelerate.Accelerator(cpu=True), None):
        model, passes = copy.deepcopy(start), 0
        opt: Any = FusedSAM(model.parameters(), torch.optim.SGD, rho=0.3, start=4, lr=0.1, momentum=0.9)
        sam, backward = opt, Tensor.backward
        if accelerator is not None:
            model, opt = accelerator.prepare(model, opt)
            sam, backward = unwrap_optimizer(opt), accelerator.backward
        for batch in BATCHES:
            if sam.perturbs:
                backward(loss_of(model, batch))
                sam.first_step(zero_grad=True)
                passes += 1
            backward(loss_of(model, batch))
            opt.step()
            opt.zero_grad()
            passes += 1
        assert passes == 4 + 2 * 2
        ends.append(list(model.parameters()))
    assert same_bits(*ends)


@pytest.mark.shows("Accelerate", "`save_state`, `load_state`, bit for bit", "works")
def test_a_state_saved_and_loaded_by_accelerate(tmp_path: Any) -> None:
    def steps(model: nn.Module, opt: Any, batches: Tensor) -> None:
        for batch in batches:
            loss_of(model, batch).backward()
            unwrap_optimizer(opt).first_step(zero_grad=True)
            loss_of(model, batch).backward()
            opt.step()
            opt.zero_grad()

    accelerator = accelerate.Accelerator(cpu=True)
    model, opt = accelerator.prepare(*make_training())
    steps(model, opt, BATCHES[:3])
    accelerator.save_state(str(tmp_path))
    steps(model, opt, BATCHES[3:])
    weights = [p.detach().clone() for p in model.parameters()]
    accelerator.load_state(str(tmp_path))
    steps(model, opt, BATCHES[3:])
    assert same_bits(weights, list(model.parameters()))


@pytest.mark.shows("Accelerate", "`step(closure)` of the prepared optimizer", "works")
def test_closures_through_the_prepared_optimizer() -> None:
    accelerator = accelerate.Accelerator(cpu=True)
    start, _ = make_training()
    model, opt = accelerator.prepare(*make_training(start))
    expected, plain = make_training(start)
    for batch in BATCHES:
        opt.step(lambda batch=batch: accelerator.backward(loss_of(model, batch)))
        plain.step(lambda batch=batch: loss_of(expected, batch).backward())
    assert same_bits(list(model.parameters()), list(expected.parameters()))


@pytest.mark.shows("Accelerate", "`accumulate()` with a closure", "warning")
def test_accumulate_with_a_closure_warns_of_the_lost_micro_batches() -> None:
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, opt = accelerator.prepare(*make_training())

    def train() -> None:
        for batch in BATCHES:
            with accelerator.accumulate(model):
                if not accelerator.sync_gradients:
                    accelerator.backward(loss_of(model, batch))
                opt.step(lambda batch=batch: accelerator.backward(loss_of(model, batch)))

    with pytest.warns(UserWarning, match=r"gradients when step\(closure\) began that no step has used"):
        train()


@pytest.mark.shows("Accelerate", "its GradScaler, with and without clipping", "works")
@pytest.mark.parametrize("clip", [False, True])
def test_its_grad_scaler_unscales_the_second_gradient(clip: bool) -> None:
    """The optimizer is wrapped by hand, because `mixed_precision="fp16"` needs a GPU. The scale is a power of two, so
    nothing is rounded."""
    start, _ = make_training()
    accelerate.Accelerator(cpu=True)
    model, opt = make_training(start)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    wrapped_opt = accelerate.optimizer.AcceleratedOptimizer(opt, scaler=scaler)
    for batch in BATCHES:
        scaler.scale(loss_of(model, batch)).backward()
        unwrap_optimizer(wrapped_opt).first_step(zero_grad=True)
        scaler.scale(loss_of(model, batch)).backward()
        if clip:
            scaler.unscale_(opt)
        nn.utils.clip_grad_norm_(model.parameters(), CLIP if clip else torch.inf)
        wrapped_opt.step()
        wrapped_opt.zero_grad()
    expected, plain = make_training(start)
    for batch in BATCHES:
        loss_of(expected, batch).backward()
        plain.first_step(zero_grad=True)
        loss_of(expected, batch).backward()
        nn.utils.clip_grad_norm_(expected.parameters(), CLIP if clip else torch.inf)
        plain.second_step(zero_grad=True)
    for weights, expected_weights in zip(model.parameters(), expected.parameters()):
        torch.testing.assert_close(weights, expected_weights, rtol=1e-5, atol=1e-6)


@pytest.mark.shows(
    "Accelerate", "its GradScaler skips a step (its schedulers count it, as with torch's fused optimizers)", "works"
)
def test_its_grad_scaler_skips_an_infinite_gradient() -> None:
    accelerate.Accelerator(cpu=True)
    model, opt = make_training()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    wrapped_opt = accelerate.optimizer.AcceleratedOptimizer(opt, scaler=scaler)
    old_model = copy.deepcopy(model)
    scaler.scale(loss_of(model, BATCHES[0])).backward()
    unwrap_optimizer(wrapped_opt).first_step(zero_grad=True)
    scaler.scale(loss_of(model, BATCHES[0]) * torch.inf).backward()
    wrapped_opt.step()
    assert same_bits(list(model.parameters()), list(old_model.parameters()))
    assert scaler.get_scale() == 2.0**9
    # Accelerate asks whether `step` was called, which it is, as torch's fused optimizers are: its schedulers count the
    # step.
    assert not wrapped_opt.step_was_skipped


@pytest.mark.shows("Accelerate", "`unwrap_optimizer` of another optimizer", "clear error")
def test_what_has_no_fused_sam_in_it_is_refused() -> None:
    opt = accelerate.Accelerator(cpu=True).prepare(torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1))
    with pytest.raises(TypeError, match="got AcceleratedOptimizer around SGD"):
        unwrap_optimizer(opt)
    with pytest.raises(TypeError, match="got None"):
        unwrap_optimizer(None)


@pytest.mark.shows("Accelerate", "`step()` of the prepared optimizer without a first half", "clear error")
def test_the_prepared_optimizer_alone_says_that_a_pass_is_missing() -> None:
    accelerator = accelerate.Accelerator(cpu=True)
    model, opt = accelerator.prepare(*make_training())
    accelerator.backward(loss_of(model, BATCHES[0]))
    with pytest.raises(RuntimeError, match=r"step\(\) has nothing to do: no closure"):
        opt.step()
