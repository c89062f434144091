"""Trainers without their libraries. With a variant that combines both gradients, the optimizer clips in their place.
Errors name the trainer and the place of an option."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from fastsam import GSAM, SAM, FusedSAM
from fastsam.integrations import lightning
from fastsam.integrations.hf import SAMTrainerMixin


class Trainer:
    """The methods of transformers' `Trainer` that make an optimizer and clip."""

    is_deepspeed_enabled = False

    def __init__(self, optimizer: FusedSAM) -> None:
        self.optimizer, self.optimizer_cls_and_kwargs = optimizer, None
        self.args = SimpleNamespace(max_grad_norm=0.5)
        self.limits: list[float] = []
        self.accelerator = SimpleNamespace(clip_grad_norm_=lambda params, limit: self.limits.append(limit))

    def create_optimizer(self, model: Any) -> FusedSAM:
        return self.optimizer

    def _clip_grad_norm(self, model: nn.Module) -> None:
        self.accelerator.clip_grad_norm_(model.parameters(), self.args.max_grad_norm)


@pytest.mark.parametrize(("variant", "combines"), [(SAM(), False), (GSAM(), True)])
def test_transformers(variant: SAM, combines: bool) -> None:
    model = nn.Linear(2, 1)
    opt = FusedSAM(model.parameters(), torch.optim.SGD, variant=variant, lr=0.1)
    trainer: Any = type("Own", (SAMTrainerMixin, Trainer), {})(opt)
    assert trainer.create_optimizer() is opt
    trainer._clip_grad_norm(model)
    assert opt.max_grad_norm == (0.5 if combines else None)
    assert trainer.limits == [math.inf if combines else 0.5]


@pytest.mark.parametrize("name", ["rho", "adaptive"])
def test_an_option_of_the_variant_is_refused_with_its_place(name: str) -> None:
    trainer: Any = type("SAMTrainer", (SAMTrainerMixin, Trainer), {})
    with pytest.raises(TypeError, match=rf"SAMTrainer has no option '{name}'.*variant=fastsam.SAM\({name}=...\)"):
        trainer(None, **{name: 0.1})


def test_a_plain_trainer_is_told_of_the_one_with_two_passes() -> None:
    """The name of the calling module is the one of transformers' `Trainer`."""
    opt = FusedSAM(nn.Linear(2, 1).parameters(), torch.optim.SGD, lr=0.1)
    for module, hint in (("transformers.trainer", "fastsam.integrations.hf.SAMTrainer"), ("mine", "$")):
        with pytest.raises(RuntimeError, match=rf"step\(\) has nothing to do.*second backward pass.*{hint}"):
            exec("opt.step()", {"__name__": module, "opt": opt})


@pytest.mark.parametrize(
    ("variant", "algorithm", "combines"), [(SAM(), None, False), (GSAM(), None, True), (GSAM(), "value", False)]
)
def test_lightning(variant: SAM, algorithm: str | None, combines: bool) -> None:
    model: Any = nn.Linear(2, 1)
    model.automatic_optimization, model.log = True, print
    opt = FusedSAM(model.parameters(), torch.optim.SGD, variant=variant, lr=0.1)
    trainer = SimpleNamespace(
        optimizers=[opt], callbacks=[], accumulate_grad_batches=1, precision_plugin=None,
        gradient_clip_algorithm=algorithm and SimpleNamespace(value=algorithm), gradient_clip_val=0.5,
    )  # fmt: skip
    hooks = lightning._Hooks()
    hooks.on_fit_start(trainer, model)
    assert opt.max_grad_norm == (0.5 if combines else None)
    assert trainer.gradient_clip_val == (None if combines else 0.5)
    hooks.teardown(trainer, model, "fit")
    assert trainer.gradient_clip_val == 0.5
