"""Steps with a GradScaler: unscaled once, skipped where it must be, and never left perturbed."""

import math
import weakref
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fastsam import MSAM, SAM, FusedSAM
from fastsam.backends import Backend
from tests.helpers.sam_oracle import Oracle, backward, copies, gradients, landscape, make_parameters, same_bits
from tests.helpers.trainings import state

pytestmark = pytest.mark.usefixtures("poisoned_memory")

SGD = torch.optim.SGD
BASES = {
    "sgd": (SGD, {"lr": 0.1, "momentum": 0.9}),
    "adamw": (torch.optim.AdamW, {"lr": 0.05}),
    "unfused": (torch.optim.NAdam, {"lr": 0.05}),
}


def scaled_backward(params: list[nn.Parameter], scaler: Any, step: int) -> None:
    for p in params:
        p.grad = None
    scaler.scale(landscape(params, step)).backward()


def make_training(
    backend: Backend, base: Any = SGD, dtype: torch.dtype = torch.float64, **options: Any
) -> tuple[list[nn.Parameter], FusedSAM, Any]:
    params = make_parameters([(5, 3), (8,)], dtype, backend.device)
    opt = FusedSAM(params, base, backend=backend.name, **{"lr": 0.1, **options})
    return params, opt, torch.amp.GradScaler(backend.device, init_scale=1024.0)


def plain_step(params: list[nn.Parameter], opt: FusedSAM, scaler: Any, is_bad: bool = False) -> None:
    """Take a step. Non-finite first gradients perturb nothing, so it equals SGD with the second gradients."""
    old_weights = copies(params)
    scaled_backward(params, scaler, 0)
    if is_bad:
        params[0].grad[1] = math.inf
    opt.first_step()
    assert same_bits(old_weights, params) is is_bad
    scaled_backward(params, scaler, 0)
    expected = [b - 0.1 * p.grad / 1024 for b, p in zip(old_weights, params)]
    scaler.step(opt)
    scaler.update()
    for p, e in zip(params, expected):
        torch.testing.assert_close(p.detach(), e)


def test_a_bad_first_pass_alone_is_a_plain_step(backend: Backend) -> None:
    plain_step(*make_training(backend), is_bad=True)


@pytest.mark.parametrize("call_style", ["positional", "keyword"])
def test_a_closure_with_a_scaler_is_an_error(call_style: str, backend: Backend) -> None:
    """A trainer that passes its closure on would step with scaled gradients: an error with a remedy."""
    params, opt, scaler = make_training(backend)
    old_weights = copies(params)

    def closure() -> Tensor:
        loss = landscape(params, 0)
        scaler.scale(loss).backward()
        return loss

    closure()
    with pytest.raises(RuntimeError, match="[Cc]losure"):
        scaler.step(opt, closure) if call_style == "positional" else scaler.step(opt, closure=closure)
    assert same_bits(old_weights, params)
    # state of the refused call does not scale the next step
    plain_step(params, opt, torch.amp.GradScaler(backend.device, init_scale=1024.0))


def test_a_disabled_scaler_hands_the_closure_on(backend: Backend) -> None:
    scaler = torch.amp.GradScaler(backend.device, enabled=False)
    ends = []
    for step in (scaler.step, lambda o, c: o.step(c)):
        params, opt, _ = make_training(backend)

        def closure(params: list[nn.Parameter] = params) -> Tensor:
            loss = landscape(params, 0)
            scaler.scale(loss).backward()
            return loss

        step(opt, closure)
        ends.append(params)
    assert same_bits(*ends)


def test_an_error_inside_a_scaled_step_leaves_no_scale_behind(backend: Backend) -> None:
    params, opt, scaler = make_training(backend)
    old_weights = copies(params)
    scaled_backward(params, scaler, 0)
    opt.first_step()
    scaled_backward(params, scaler, 0)
    opt.param_groups[0]["lr"] = math.nan
    with pytest.raises(ValueError, match="NaN"):
        scaler.step(opt)
    assert same_bits(old_weights, params)
    assert not hasattr(opt, "grad_scale") and not hasattr(opt, "found_inf")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_parameters(dtype: torch.dtype, backend: Backend) -> None:
    """float16 weights and float16 gradients: unscaled inside the fused update, where they are float32."""
    if (dtype, backend.device) == (torch.bfloat16, "cuda"):
        pytest.skip("torch's GradScaler has no check of bfloat16 gradients on CUDA")
    params = make_parameters([(50,)], dtype, backend.device)
    opt = FusedSAM(params, SGD, lr=0.1, backend=backend.name)
    scaler = torch.amp.GradScaler(backend.device, init_scale=256.0)
    oracle = Oracle([{"params": params}], SGD, {"lr": 0.1})
    for step in range(3):
        backward(params, step)
        params[0].grad *= 256
        oracle.perturb([g.float() / 256 for g in gradients(params)])
        opt.first_step()
        backward(params, step)
        params[0].grad *= 256
        oracle.update([g.float() / 256 for g in gradients(params)])
        scaler.scale(torch.ones((), device=backend.device))
        scaler.step(opt)
        scaler.update()
    torch.testing.assert_close(
        opt.state_dict()["state"][0]["master"].double().cpu(), oracle.params[0].detach(), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("clip", [False, True], ids=["", "clipped"])
@pytest.mark.parametrize("name", BASES)
def test_unscaling_before_the_first_step_is_an_error(name: str, clip: bool, backend: Backend) -> None:
    """The scaler would not unscale the second gradient: it would be applied with its scale."""
    params, opt, scaler = make_training(backend, BASES[name][0], torch.float32, rho=0.3, **BASES[name][1])

    def step(number: int, unscale_first: bool) -> None:
        scaled_backward(params, scaler, number)
        if unscale_first:
            scaler.unscale_(opt)
        opt.first_step(zero_grad=True)
        scaled_backward(params, scaler, number)
        if not unscale_first and clip:
            scaler.unscale_(opt)
            torch.nn.utils.clip_grad_norm_(params, 0.1)
        scaler.step(opt)
        scaler.update()

    for number in (0, 1):  # before the optimizer has met the scaler, and after
        old_weights, old_state = copies(params), state(opt)
        with pytest.raises(RuntimeError, match="unscale_.* before first_step"):
            step(number, unscale_first=True)
        assert same_bits(old_weights, params) and same_bits(old_state, state(opt))
        scaler.update()
        opt.first_step()  # the refused step is not under way
        opt.restore()
        step(number, unscale_first=False)
        assert not same_bits(old_weights, params)


@pytest.mark.parametrize("name", BASES)
def test_an_overflow_of_the_second_pass_skips_the_first_step(name: str, backend: Backend) -> None:
    params, opt, scaler = make_training(backend, BASES[name][0], **BASES[name][1])
    old_weights = copies(params)
    for number, skips in enumerate((True, False)):
        scaled_backward(params, scaler, number)
        opt.first_step(zero_grad=True)
        scaled_backward(params, scaler, number)
        if skips:
            params[0].grad[1] = math.inf
        scaler.unscale_(opt)
        scaler.step(opt)
        scaler.update()
        assert same_bits(old_weights, params) is skips
        assert not (skips and any(t.any() for t in state(opt)))
    assert scaler.get_scale() == 512.0


def test_a_scaler_that_is_gone_is_not_kept(backend: Backend) -> None:
    params, opt, _ = make_training(backend)
    for _ in range(2):
        scaler = torch.amp.GradScaler(backend.device, init_scale=1024.0)
        reference = weakref.ref(scaler)
        scaled_backward(params, scaler, 0)
        opt.first_step()
        scaled_backward(params, scaler, 0)
        scaler.step(opt)
        del scaler
        assert reference() is None


@pytest.mark.parametrize("variant", [SAM(0.3), MSAM(0.3)], ids=lambda variant: type(variant).__name__)
@pytest.mark.parametrize("base", [SGD, torch.optim.NAdam], ids=["fused", "own step"])
def test_a_region_of_autocast_around_whole_steps(base: type[torch.optim.Optimizer], variant: SAM) -> None:
    if isinstance(variant, MSAM) and base is not SGD:
        pytest.skip("no momentum to perturb against")
    ends = []
    for outermost in (False, True):
        torch.manual_seed(0)
        model, x = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)), torch.randn(16, 6)
        options = {"momentum": 0.9} if base is SGD else {}
        opt = FusedSAM(model.parameters(), base, lr=0.1, variant=variant, **options)

        def closure(model: nn.Module = model, x: Tensor = x) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(x).square().mean()
            loss.backward()
            return loss

        with torch.autocast("cpu", torch.bfloat16) if outermost else nullcontext():
            losses = [opt.step(closure).item() for _ in range(3)]
            opt.eval()
            losses.append(closure().item())
        ends.append((losses, *(p.tolist() for p in model.parameters())))
    assert ends[0] == ends[1], "each pass casts the weights that are there now"


class Squares(SAM):
    """A direction that is homogeneous and not linear."""

    def direction(self, g: Tensor, state: Tensor, next_state: Tensor) -> Tensor:
        return next_state.copy_(g * g.abs() / g.norm() + state / 2)


class Signs(SAM):
    """A direction that is neither."""

    def direction(self, g: Tensor, state: Tensor, next_state: Tensor) -> Tensor:
        return g + g.sign()


@pytest.mark.parametrize(("variant", "is_right"), [(Squares, True), (Signs, False)])
def test_the_scale_cancels_in_a_homogeneous_direction(variant: type[SAM], is_right: bool) -> None:
    """Compare trainings with two scales. The 1e-12 below the perturbation is not scaled, so the last digits differ."""

    def train(scale: float) -> list[Tensor]:
        params = make_parameters([(5, 3), (8,)], torch.float64)
        opt = FusedSAM(params, SGD, lr=0.1, variant=variant(0.05), backend="reference")
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        for step in range(3):
            scaled_backward(params, scaler, step)
            opt.first_step()
            scaled_backward(params, scaler, step)
            scaler.step(opt)
            scaler.update()
        return [p.detach() for p in params]

    pairs = zip(train(2.0**16), train(1.0), strict=True)
    assert all(torch.allclose(a, b, rtol=1e-9, atol=1e-9) for a, b in pairs) is is_right
