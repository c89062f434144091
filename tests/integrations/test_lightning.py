"""Lightning's trainer with FusedSAM, compared with the same steps in a plain loop."""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fastsam
from fastsam import FusedSAM, frozen_batchnorm_stats
from fastsam.integrations import lightning as integration
from tests.helpers.libraries import library
from tests.helpers.sam_oracle import same_bits

lightning = library("lightning")
SAMCallback = integration.SAMCallback

BATCHES = torch.randn(6, 8, 4, generator=torch.Generator().manual_seed(0))


class Model(lightning.LightningModule):
    def __init__(self, manual: bool = False, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))
        self.automatic_optimization = not manual
        self.options = {"lr": 0.1, "momentum": 0.9, "rho": 0.3, **options}
        self.losses: list[float] = []

    def loss(self, batch: Tensor) -> Tensor:
        return (self.layers(batch) - 1).square().mean()

    def training_step(self, batch: Tensor, number: int) -> Tensor | None:
        if self.automatic_optimization:
            loss = self.loss(batch)
            self.log("loss", loss, on_step=False, on_epoch=True, reduce_fx="sum")
            return loss
        opt = self.optimizers()
        self.manual_backward(self.loss(batch))
        opt.first_step(zero_grad=True)
        assert opt.is_perturbed and opt.phase == "second"
        with frozen_batchnorm_stats(self.layers):
            self.manual_backward(self.loss(batch))
        opt.second_step(zero_grad=True)
        return None

    def configure_optimizers(self) -> FusedSAM:
        return FusedSAM(self.parameters(), torch.optim.SGD, **self.options)

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(list(BATCHES), batch_size=None)


class OnePass(Model):
    """Steps of one pass; in manual optimization by `step()`."""

    def __init__(self, manual: bool = False) -> None:
        super().__init__(manual)
        self.options = {"lr": 0.1, "momentum": 0.9, "variant": fastsam.MSAM(rho=0.3)}

    def training_step(self, batch: Tensor, number: int) -> Tensor | None:
        loss = self.loss(batch)
        if self.automatic_optimization:
            return loss
        self.manual_backward(loss)
        opt = self.optimizers().optimizer  # FusedSAM itself
        opt.step()
        opt.zero_grad()
        return None


def fit(model: Model, *callbacks: Any, ckpt_path: str | None = None, **settings: Any) -> Any:
    quiet = {
        "logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False,
    }  # fmt: skip
    trainer = lightning.Trainer(
        **{**quiet, "accelerator": "cpu", "max_epochs": 1, **settings}, callbacks=list(callbacks)
    )
    trainer.fit(model, ckpt_path=ckpt_path)
    return trainer


def plain(model: Model, batches: Tensor = BATCHES, clip: float = 0.0, bf16: bool = False) -> Model:
    """Take the same steps without a trainer."""
    model = copy.deepcopy(model)
    opt = model.configure_optimizers()

    def backward(batch: Tensor) -> None:
        opt.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            loss = model.loss(batch)
        loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)

    for batch in batches:
        backward(batch)
        opt.first_step()
        with frozen_batchnorm_stats(model):
            backward(batch)
        opt.second_step()
    return model


def same(a: nn.Module, b: nn.Module) -> bool:
    return same_bits(list(a.parameters()), list(b.parameters())) and same_bits(list(a.buffers()), list(b.buffers()))


def test_steps_before_sam_take_one_pass() -> None:
    model, passes = Model(start=4), 0

    def count(*_: Any) -> None:
        nonlocal passes
        passes += 1

    expected = copy.deepcopy(model)
    opt = expected.configure_optimizers()
    for t, batch in enumerate(BATCHES):
        assert opt.perturbs is (t >= 4)
        for second in (False, True) if opt.perturbs else (True,):
            opt.zero_grad()
            with frozen_batchnorm_stats(expected) if opt.is_perturbed else nullcontext():
                expected.loss(batch).backward()
            opt.second_step() if second else opt.first_step()
    model.layers.register_forward_hook(count)
    fit(model, SAMCallback())
    assert same(model, expected)
    assert passes == 4 + 2 * 2


@pytest.mark.shows("Lightning", "manual optimization through `self.optimizers()`", "works")
def test_manual_mode_through_the_wrapped_optimizer() -> None:
    model = Model(manual=True)
    expected = plain(model)
    trainer = fit(model)
    assert same(model, expected)
    assert trainer.global_step == len(BATCHES), "a step, not a pass"


@pytest.mark.shows("Lightning", "manual optimization: `max_steps`", "works")
def test_manual_mode_keeps_max_steps() -> None:
    model = Model(manual=True)
    expected = plain(model, BATCHES[:3])
    assert fit(model, max_steps=3, max_epochs=-1).global_step == 3
    assert same(model, expected)


@pytest.mark.shows("Lightning", "manual optimization: a closure between the halves", "clear error")
def test_a_closure_midway_is_still_an_error() -> None:
    class Wrong(Model):
        def training_step(self, batch: Tensor, number: int) -> None:
            opt = self.optimizers()
            self.manual_backward(self.loss(batch))
            opt.first_step(zero_grad=True)
            opt.step(lambda: self.manual_backward(self.loss(batch)))

    with pytest.raises(RuntimeError, match=r"call second_step\(\)"):
        fit(Wrong(manual=True))


@pytest.mark.shows(
    "Lightning", "automatic optimization with `SAMCallback()`; clipping, bf16, running statistics", "works"
)
@pytest.mark.parametrize(
    "settings", [{}, {"gradient_clip_val": 0.05}, {"gradient_clip_val": 0.05, "precision": "bf16-mixed"}]
)
def test_automatic_mode_with_the_callback(settings: dict[str, Any]) -> None:
    model = Model()
    expected = plain(model, clip=settings.get("gradient_clip_val", 0.0), bf16="precision" in settings)
    trainer = fit(model, SAMCallback(), **settings)
    assert same(model, expected)
    assert trainer.global_step == len(BATCHES) == int(model.layers[1].num_batches_tracked)
    assert "log" not in vars(model), "the module is as it was"


@pytest.mark.shows("Lightning", "`SAMCallback()`: `self.log` writes only in the first pass", "works")
def test_the_first_pass_alone_is_logged() -> None:
    first_passes: list[Tensor] = []

    class LoggingModel(Model):
        def training_step(self, batch: Tensor, number: int) -> Tensor:
            loss = super().training_step(batch, number)
            if not self.optimizers().is_perturbed:
                first_passes.append(loss.detach())
            return loss

    trainer = fit(LoggingModel(), SAMCallback())
    torch.testing.assert_close(trainer.callback_metrics["loss"], torch.stack(first_passes).sum())
    assert len(first_passes) == len(BATCHES)


def _adam(self: Model) -> torch.optim.Optimizer:
    return torch.optim.Adam(self.parameters())


@pytest.mark.shows(
    "Lightning", "`SAMCallback()` with `MSAM`: the clean weights are saved and left in the model", "works"
)
@pytest.mark.parametrize("manual", [False, True])
def test_a_variant_of_one_pass_shows_the_clean_weights(tmp_path: Path, manual: bool) -> None:
    model = OnePass(manual)
    checkpoint_callback = lightning.pytorch.callbacks.ModelCheckpoint(tmp_path, save_last=True)
    fit(model, SAMCallback(), checkpoint_callback, enable_checkpointing=True)
    clean_module = OnePass()
    opt = clean_module.configure_optimizers()
    for batch in BATCHES:
        clean_module.loss(batch).backward()
        opt.step()
        opt.zero_grad()
    perturbed_weights = copy.deepcopy(dict(clean_module.named_parameters()))
    opt.eval()
    checkpoint_weights = torch.load(tmp_path / "last.ckpt", weights_only=False)["state_dict"]
    for name, value in clean_module.named_parameters():
        assert same_bits(checkpoint_weights[name], value) and same_bits(model.get_parameter(name), value)
        # The gradient of the bias before the BatchNorm is rounding, on some processors 0.
        assert name == "layers.0.bias" or not torch.equal(perturbed_weights[name], value)


def test_a_variant_of_one_pass_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    joint_model, first, second = (OnePass() for _ in range(3))
    fit(joint_model, SAMCallback(), max_epochs=2)
    checkpoint_callback = lightning.pytorch.callbacks.ModelCheckpoint(tmp_path, save_last=True)
    fit(first, SAMCallback(), checkpoint_callback, enable_checkpointing=True)
    fit(second, SAMCallback(), ckpt_path=str(tmp_path / "last.ckpt"), max_epochs=2)
    for a, b in zip(joint_model.parameters(), second.parameters(), strict=True):
        assert same_bits(a, b)


@pytest.mark.shows("Lightning", "`SAMCallback()` with `accumulate_grad_batches`, or another optimizer", "clear error")
@pytest.mark.parametrize(
    ("settings", "optimizer", "message"),
    [
        ({"accumulate_grad_batches": 2}, None, "accumulate_grad_batches=2 with FusedSAM"),
        ({}, _adam, "to return one FusedSAM, got Adam"),
    ],
)
def test_the_callback_refuses_what_cannot_work(
    settings: dict[str, Any], optimizer: Callable[[Model], Any] | None, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if optimizer is not None:
        monkeypatch.setattr(Model, "configure_optimizers", optimizer)
    with pytest.raises(ValueError, match=message):
        fit(Model(), SAMCallback(), **settings)


def make_plugins() -> list[Any]:
    """Return a plugin as `precision="16-mixed"` makes it on a GPU; on a CPU the trainer would take bf16.

    The scale is a power of two, so it rounds nothing.
    """
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    return [lightning.pytorch.plugins.precision.MixedPrecision("16-mixed", "cpu", scaler)]


@pytest.mark.shows("Lightning", "`16-mixed` (GradScaler): manual optimization", "works")
def test_manual_mode_unscales_the_second_gradient() -> None:
    model = Model(manual=True)
    expected = plain(model)
    trainer = fit(model, plugins=make_plugins())
    for weights, expected_weights in zip(model.parameters(), expected.parameters()):
        torch.testing.assert_close(
            weights, expected_weights, rtol=0.0, atol=1e-3
        )  # float16 autocast; a scaled gradient is a thousand times larger
    assert trainer.precision_plugin.scaler.get_scale() == 2.0**10 and trainer.global_step == len(BATCHES)


@pytest.mark.shows(
    "Lightning", "`16-mixed` (GradScaler): automatic optimization, with and without `SAMCallback()`", "clear error"
)
@pytest.mark.parametrize(
    ("callbacks", "error", "message"),
    [
        ((SAMCallback,), ValueError, "precision='16-mixed' with FusedSAM .*bf16-mixed"),
        ((), RuntimeError, r"step\(\) has nothing to do: no closure"),
    ],
    ids=["callback", "alone"],
)
def test_automatic_mode_refuses_a_scaler(callbacks: tuple[Any, ...], error: type[Exception], message: str) -> None:
    model = Model()
    old_model = copy.deepcopy(model)
    with pytest.raises(error, match=message):
        fit(model, *(make() for make in callbacks), plugins=make_plugins())
    assert same_bits(list(model.parameters()), list(old_model.parameters()))


@pytest.mark.shows("Lightning", "`accumulate_grad_batches` without the callback", "warning")
def test_without_the_callback_accumulation_warns() -> None:
    with pytest.warns(UserWarning, match=r"gradients when step\(closure\) began that no step has used"):
        fit(Model(), accumulate_grad_batches=2)
