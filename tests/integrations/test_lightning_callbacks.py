"""`SAMCallback` with a stand-in for Lightning: its lazy class, and the callbacks that it refuses by their names."""

import pickle
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from fastsam import MSAM, SAM, FusedSAM
from fastsam.integrations import lightning

WeightAveraging = type("WeightAveraging", (), {})
KINDS = {
    "GradientAccumulationScheduler": type("GradientAccumulationScheduler", (), {}),
    "EMAWeightAveraging": type("EMAWeightAveraging", (WeightAveraging,), {}),
    "StochasticWeightAveraging": type("StochasticWeightAveraging", (), {}),
    "Own": type("Own", (), {}),
}


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a module with an empty `Callback` in Lightning's place."""
    pytorch: Any = ModuleType("lightning.pytorch")
    pytorch.Callback = type("Callback", (), {})
    monkeypatch.setitem(sys.modules, "lightning", ModuleType("lightning"))
    monkeypatch.setitem(sys.modules, "lightning.pytorch", pytorch)
    monkeypatch.setitem(vars(lightning), "SAMCallback", None)
    del vars(lightning)["SAMCallback"]


@pytest.mark.usefixtures("stand_in")
def test_the_callback_is_a_class_that_can_be_subclassed_and_pickled() -> None:
    from fastsam.integrations.lightning import SAMCallback

    class OwnCallback(SAMCallback):  # type: ignore[misc, unused-ignore]
        pass

    assert SAMCallback is lightning.SAMCallback and isinstance(OwnCallback(), SAMCallback)
    assert isinstance(SAMCallback(), sys.modules["lightning.pytorch"].Callback)
    assert pickle.loads(pickle.dumps(SAMCallback))() is not None


def test_without_lightning_only_the_callback_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lightning.pytorch", None)
    monkeypatch.setitem(vars(lightning), "SAMCallback", None)
    del vars(lightning)["SAMCallback"]
    with pytest.raises(ImportError, match="lightning"):
        lightning.SAMCallback  # noqa: B018
    with pytest.raises(AttributeError, match="SAMCall"):
        lightning.SAMCall  # noqa: B018


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize(
    ("callback", "sam", "is_refused"),
    [
        ("GradientAccumulationScheduler", SAM(), True), ("EMAWeightAveraging", MSAM(), True),
        ("EMAWeightAveraging", SAM(), False), ("StochasticWeightAveraging", MSAM(), True), ("Own", MSAM(), False),
    ],
)  # fmt: skip
def test_a_callback_is_refused_by_its_name(callback: str, sam: SAM, is_refused: bool) -> None:
    model: Any = nn.Linear(2, 1)
    model.automatic_optimization, model.log = True, print
    opt = FusedSAM(model.parameters(), torch.optim.SGD, variant=sam, lr=0.1, momentum=0.9)
    trainer = SimpleNamespace(
        optimizers=[opt], callbacks=[KINDS[callback]()], accumulate_grad_batches=1, precision_plugin=None,
        gradient_clip_algorithm=None, gradient_clip_val=1.0,
    )  # fmt: skip
    sam_callback = lightning.SAMCallback()
    if not is_refused:
        return sam_callback.on_fit_start(trainer, model)
    with pytest.raises(ValueError, match=f"^{callback} with {'MSAM' if isinstance(sam, MSAM) else 'FusedSAM'}"):
        sam_callback.on_fit_start(trainer, model)
