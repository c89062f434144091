"""Callbacks beside Lightning's `sam_callback()` that it refuses by name, with a trainer that has only their names."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from fastsam import MSAM, SAM, FusedSAM
from fastsam.integrations.lightning import sam_callback

WeightAveraging = type("WeightAveraging", (), {})
KINDS = {
    "GradientAccumulationScheduler": type("GradientAccumulationScheduler", (), {}),
    "EMAWeightAveraging": type("EMAWeightAveraging", (WeightAveraging,), {}),
    "StochasticWeightAveraging": type("StochasticWeightAveraging", (), {}),
    "Own": type("Own", (), {}),
}


@pytest.mark.parametrize(
    ("callback", "sam", "refused"),
    [
        ("GradientAccumulationScheduler", SAM(), True),
        ("EMAWeightAveraging", MSAM(), True),
        ("EMAWeightAveraging", SAM(), False),
        ("StochasticWeightAveraging", MSAM(), True),
        ("Own", MSAM(), False),
    ],
)
def test_a_callback_is_refused_by_its_name(
    callback: str, sam: SAM, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytorch: Any = ModuleType("lightning.pytorch")
    pytorch.Callback = object
    monkeypatch.setitem(sys.modules, "lightning", ModuleType("lightning"))
    monkeypatch.setitem(sys.modules, "lightning.pytorch", pytorch)
    model: Any = nn.Linear(2, 1)
    model.automatic_optimization, model.log = True, print
    opt = FusedSAM(model.parameters(), torch.optim.SGD, variant=sam, lr=0.1, momentum=0.9)
    trainer = SimpleNamespace(
        optimizers=[opt], callbacks=[KINDS[callback]()], accumulate_grad_batches=1, precision_plugin=None
    )
    made = sam_callback()
    if not refused:
        return made.on_fit_start(trainer, model)
    with pytest.raises(ValueError, match=f"^{callback} with {'MSAM' if isinstance(sam, MSAM) else 'FusedSAM'}"):
        made.on_fit_start(trainer, model)
