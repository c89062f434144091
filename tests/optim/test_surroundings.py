"""Code around an optimizer: hooks, schedulers, BatchNorm, names of the package."""

import re
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import fastsam
from fastsam import GSAM, FusedSAM, backends, frozen_batchnorm_stats
from tests.helpers.sam_cases import BASES, SGD, closure_of
from tests.helpers.sam_oracle import backward, landscape, make_parameters, same_bits


def two_halves(opt: FusedSAM, params: list[nn.Parameter]) -> None:
    backward(params, 0)
    opt.first_step()
    backward(params, 0)
    opt.second_step()


# --- hooks ---


@pytest.mark.parametrize("owner", ["opt", "base", "global"])
@pytest.mark.parametrize("style", ["closure", "halves", "scaler"])
@pytest.mark.parametrize("name", BASES)
def test_step_hooks_fire_once_per_step(name: str, style: str, owner: str) -> None:
    base, options = BASES[name]
    params = make_parameters([(5,)], torch.float32)
    opt = FusedSAM(params, base, **options)
    calls: list[str] = []

    def pre(*_: Any) -> None:
        calls.append("pre")

    def post(*_: Any) -> None:
        calls.append("post")

    if owner == "global":
        handles = [register_optimizer_step_pre_hook(pre), register_optimizer_step_post_hook(post)]
    else:
        target = opt if owner == "opt" else opt.base_optimizer
        handles = [target.register_step_pre_hook(pre), target.register_step_post_hook(post)]
    try:
        for _ in range(2):
            if style == "closure":
                opt.step(closure_of(params))
            elif style == "halves":
                two_halves(opt, params)
            else:
                scaler = torch.amp.GradScaler("cpu")
                scaler.scale(landscape(params, 0)).backward()
                opt.first_step(zero_grad=True)
                scaler.scale(landscape(params, 0)).backward()
                scaler.step(opt)
                opt.zero_grad()
        assert calls == ["pre", "post"] * 2
    finally:
        for handle in handles:
            handle.remove()


def test_a_hook_may_replace_the_closure() -> None:
    params = make_parameters([(5,)], torch.float32)
    opt = FusedSAM(params, SGD, lr=0.1)
    calls: list[int] = []

    def new_closure() -> Tensor:
        calls.append(1)
        return closure_of(params)()

    opt.register_step_pre_hook(lambda o, args, kwargs: ((o, new_closure), {}))
    opt.step(closure_of(params))
    assert len(calls) == 2


# --- schedulers ---

SCHEDULERS: dict[str, Any] = {
    "step": lambda o: lr_scheduler.StepLR(o, 1, gamma=0.5),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.2, total_steps=10),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 5),
    "warm-up": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o), lr_scheduler.ExponentialLR(o, 0.9)], [2]
    ),
}


@pytest.mark.parametrize("owner", ["opt", "base"])
@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("tensor", [False, True], ids=["float", "tensor"])
@pytest.mark.parametrize("style", ["closure", "halves"])
def test_schedulers_see_the_steps_and_set_the_rate(style: str, tensor: bool, scheduler: str, owner: str) -> None:
    """There is no warning that `scheduler.step()` came before `optimizer.step()`, and the rates are the base
    optimizer's."""
    lr = 0.1
    params, plain_params = make_parameters([(5,)], torch.float64), make_parameters([(5,)], torch.float64)
    opt = FusedSAM(params, SGD, rho=0.0, lr=torch.tensor(lr, dtype=torch.float64) if tensor else lr, momentum=0.9)
    plain = SGD(plain_params, lr=lr, momentum=0.9)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", category=UserWarning, message=".*epoch parameter.*")  # SequentialLR's own
            schedule = SCHEDULERS[scheduler](opt if owner == "opt" else opt.base_optimizer)
            plain_schedule = SCHEDULERS[scheduler](plain)
            for _ in range(5):
                if style == "closure":
                    opt.step(closure_of(params))
                else:
                    two_halves(opt, params)
                backward(plain_params, 0)
                plain.step()
                schedule.step()
                plain_schedule.step()
                rate = opt.param_groups[0]["lr"]
                assert isinstance(rate, Tensor) == tensor
                assert float(rate) == pytest.approx(plain.param_groups[0]["lr"], rel=1e-6)
    torch.testing.assert_close(params[0].detach(), plain_params[0].detach(), rtol=1e-6 if tensor else 1e-12, atol=1e-12)


# --- BatchNorm ---


class NormNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.InstanceNorm2d(3, track_running_stats=True), nn.Flatten(),
            nn.BatchNorm1d(3 * 36, momentum=None), nn.Linear(3 * 36, 2), nn.BatchNorm1d(2, track_running_stats=False),
            nn.SyncBatchNorm(2),
        )  # fmt: skip
        self.layers[-1].eval()  # SyncBatchNorm trains on GPUs only

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def buffers(model: nn.Module) -> list[Tensor]:
    return [b.detach().clone() for b in model.buffers()]


def test_running_statistics_stay_in_the_perturbed_pass() -> None:
    torch.manual_seed(0)
    model = NormNet()
    x = torch.randn(4, 2, 8, 8)
    model(x)
    old_buffers = buffers(model)
    with torch.no_grad():
        output = model(x)
    new_buffers = buffers(model)
    assert not same_bits(old_buffers, new_buffers) and int(new_buffers[2]) == 2
    identities = list(map(id, model.buffers()))
    with frozen_batchnorm_stats(model), torch.no_grad():
        frozen_output = model(x)
        with frozen_batchnorm_stats(model.layers):
            model(2 * x)
        model(3 * x)
    assert same_bits([output], [frozen_output]), "the batch's own statistics normalise, inside as outside"
    assert same_bits(new_buffers, buffers(model)) and identities == list(map(id, model.buffers()))
    model(3 * x)
    assert not same_bits(new_buffers, buffers(model)), "afterwards they are kept again"


def test_evaluation_mode_is_evaluation_mode_inside() -> None:
    torch.manual_seed(0)
    model = NormNet()
    x = torch.randn(4, 2, 8, 8)
    model(x)
    model.eval()
    old_buffers = buffers(model)
    output = model(x)
    with frozen_batchnorm_stats(model):
        assert same_bits([output], [model(x)])
    assert same_bits(old_buffers, buffers(model))
    assert model.layers[1].track_running_stats and not model.layers[6].track_running_stats


def test_frozen_statistics_after_an_exception() -> None:
    model = NormNet()
    identities = list(map(id, model.buffers()))
    with pytest.raises(KeyboardInterrupt), frozen_batchnorm_stats(model):
        raise KeyboardInterrupt
    assert model.layers[1].track_running_stats and identities == list(map(id, model.buffers()))
    wrong_models: Any = [model]
    with pytest.raises(TypeError, match="expects a torch.nn.Module, got list"), frozen_batchnorm_stats(wrong_models):
        pass


# --- names, and what a step costs ---


def test_a_representation_has_base_variant_and_backend() -> None:
    params = make_parameters([(3,)], torch.float32)
    text = repr(FusedSAM(params, SGD, variant=GSAM(0.1, alpha=0.4), lr=0.1, backend="reference"))
    head = ["base optimizer: SGD", "variant: GSAM(interval=1, start=0, rho_fn=None, alpha=0.4)", "backend: reference"]
    assert text.splitlines()[:4] == ["FusedSAM (", *head] and "rho: 0.1" in text
    assert f"backend: {backends.backend('cpu')}\n" in repr(FusedSAM(params, SGD, lr=0.1))


def test_public_names() -> None:
    names = {"FusedSAM", "GSAM", "Lion", "MSAM", "SAM", "backend", "frozen_batchnorm_stats", "variants"}
    assert set(fastsam.__all__) == names
    assert fastsam.backend("cpu") in ("native", "foreach")
    assert re.fullmatch(r"\d+\.\d+\.\d+(\.dev\d+)?", fastsam.__version__)
