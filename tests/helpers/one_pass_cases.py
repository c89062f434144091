"""Trainings with MSAM and with the last gradient, which store the perturbed weights between steps."""

from typing import Any

import pytest
import torch

from tests.helpers.sam_oracle import copies
from tests.helpers.variant_cases import ONE_PASS, Training, make_fused

every_variant = pytest.mark.parametrize("name", ONE_PASS)
# MSAM has a momentum to go against.
every_base = pytest.mark.parametrize(
    ("name", "base"),
    [("msam", "sgd"), ("msam", "adamw"), *(("last gradient", base) for base in ("sgd", "maximize", "adamw", "nadam"))],
)
DTYPES = [torch.float32, torch.bfloat16]


def train_one_pass(name: str, steps: int, base: str = "sgd", **options: Any) -> Training:
    return make_fused(ONE_PASS[name][0], base, steps, **options)


def clean_weights_of(training: Training) -> list[torch.Tensor]:
    training.opt.eval()
    weights = copies(training.params)
    training.opt.train()
    return weights
