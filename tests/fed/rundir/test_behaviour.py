"""A resumed run with another function, or another model, of the same name is warned of, with what differs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fastsam import fed
from tests.helpers.fed_input import start


def loss_of(kind: str, weight: float) -> Callable[..., Any]:
    if kind == "plain":

        def loss(outputs, y):
            return weight * F.cross_entropy(outputs, y)
    else:

        def loss(outputs, y):
            return weight * F.cross_entropy(outputs.double(), y)

    return loss


def model_of(activation: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 4), activation(), nn.Linear(4, 3))


PLAIN: dict[str, Any] = {"loss": loss_of("plain", 1.0), "model": model_of(nn.ReLU)}


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"loss": loss_of("plain", 1.0), "model": model_of(nn.ReLU)}, None),
        ({"loss": loss_of("plain", 0.5)}, "began with another loss.weight: 1.0; it goes on with 0.5"),
        ({"loss": loss_of("double", 1.0)}, "began with another loss.code"),
        ({"model": model_of(nn.Tanh)}, "began with another model.repr"),
    ],
    ids=["the same", "closure", "code", "activation"],
)
def test_another_function_of_the_same_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, other: dict[str, Any], words: str | None
) -> None:
    run_dir = tmp_path / "run"
    start(**PLAIN, run_dir=run_dir)
    result = start(**{**PLAIN, **other}, run_dir=run_dir, resume=True, rounds=2)
    assert isinstance(result, fed.Result)
    assert (words is None and "began with another" not in caplog.text) or (words is not None and words in caplog.text)
