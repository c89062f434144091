"""LightningCLI and jsonargparse: their options are the parameters of a signature."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fastsam import GSAM, SAM
from tests.helpers.libraries import library

lightning = library("lightning")
jsonargparse = library("jsonargparse")


class Model(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def training_step(self, batch: Tensor, number: int) -> Tensor:
        return self.layer(batch).square().mean()

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(torch.ones(4, 4), batch_size=2)


CLASS = "fastsam.integrations.lightning.CommandLineFusedSAM"
QUIET = {
    "logger": "false", "enable_checkpointing": "false", "enable_progress_bar": "false", "enable_model_summary": "false",
}  # fmt: skip


def parse_options(*arguments: str) -> dict[str, Any]:
    """Return the options of the optimizer with which the command line trains."""
    from lightning.pytorch.cli import LightningCLI

    settings = [
        f"--trainer.{name}={value}" for name, value in {**QUIET, "accelerator": "cpu", "max_steps": "2"}.items()
    ]
    cli = LightningCLI(
        Model, run=False, save_config_callback=None, args=[f"--optimizer={CLASS}", *arguments, *settings]
    )
    cli.trainer.fit(cli.model)
    (opt,) = cli.trainer.optimizers
    return {"base": type(opt.base_optimizer), "variant": opt._engine.variant, **opt.param_groups[0]}


@pytest.mark.shows("Lightning", "LightningCLI: options of FusedSAM and of its base", "works")
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["lr=0.3", "momentum=0.8", "rho=0.2"], {"base": torch.optim.SGD, "lr": 0.3, "momentum": 0.8, "rho": 0.2}),
        (["dict_kwargs.lr=0.3"], {"lr": 0.3}),
        (["lr=0.3", "base_kwargs={'dampening': 0.5}"], {"lr": 0.3, "dampening": 0.5}),
        # Options that are not given are the base optimizer's own: SGD's weight decay is 0.
        (["base_optimizer=torch.optim.AdamW", "betas=[0.8, 0.9]"],
         {"base": torch.optim.AdamW, "betas": (0.8, 0.9), "weight_decay": 0.01}),
    ],
)  # fmt: skip
def test_a_command_line_sets_the_options(arguments: list[str], expected: dict[str, Any]) -> None:
    options = parse_options(*(f"--optimizer.{argument}" for argument in arguments))
    assert {name: options[name] for name in expected} == expected


@pytest.mark.shows("Lightning", "LightningCLI: a variant by its import path, `subclasses_enabled=[SAM]`", "works")
def test_a_command_line_names_a_variant() -> None:
    jsonargparse.set_parsing_settings(subclasses_enabled=[SAM])
    options = parse_options("--optimizer.lr=0.3", "--optimizer.variant=fastsam.GSAM", "--optimizer.variant.rho=0.07")
    assert (type(options["variant"]), options["rho"], options["lr"]) == (GSAM, 0.07, 0.3)
