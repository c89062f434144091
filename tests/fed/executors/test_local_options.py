"""Every option of a local step with every class of steps, on every executor, in float32 and so also by row programs."""

import functools
from typing import Any

import pytest
import torch

from fastsam import fed
from fastsam.fed.algorithms.fedadamw import Leaning, LeaningSAM
from fastsam.fed.executors.task import STEP_OPTIONS
from tests.helpers import oracle
from tests.helpers.crosses import one_in
from tests.helpers.fed_runs import FLOAT, digest, run
from tests.helpers.fed_seam import Constants
from tests.promises.step_cases import STEPS

OPTIONS: dict[str, dict[str, Any]] = {
    "momentum": {"momentum": 0.7}, "weight_decay": {"weight_decay": 0.1}, "clip_norm": {"clip_norm": 0.2},
    "clip_scope": {"clip_norm": 0.2, "clip_scope": "linear"}, "optimizer": {"optimizer": torch.optim.Adadelta},
}  # fmt: skip
REFUSED_BY_TORCH = {
    "two gradients": "an update with two gradients", "gap": "an update with two gradients",
    "shifted": "weights that are shifted for the whole round", "falling": "a learning rate that changes within a round",
}  # fmt: skip
RULES = "it serves the optimizers SGD, Adam, AdamW, Adagrad, RMSprop and Lion"


def train(executor: str, case: str, option: str | None = None) -> fed.Result:
    options = {"momentum": 0.0, "weight_decay": 0.0, **OPTIONS.get(option or "", {})}
    return run(Constants(*STEPS[case]), executor, 3, oracle.smooth_model(FLOAT), lr=0.2, **options)


@functools.cache
def plain_run(case: str, option: str | None = None) -> fed.Result:
    return train("sequential", case, option)


def classes(kind: type[fed.Step] = fed.Step) -> set[type[fed.Step]]:
    """Return the classes of steps in fastsam."""
    below = set[type[fed.Step]]().union(*map(classes, kind.__subclasses__()))
    return {step for step in {kind, *below} if step.__module__.startswith("fastsam.")}


def test_every_option_and_class_has_a_case() -> None:
    assert {*OPTIONS} == STEP_OPTIONS
    # FedAdamW's steps need AdamW, which has these options itself: see tests/fed/algorithms/test_fedadamw.py
    assert {kind for kind, _ in STEPS.values()} == classes() - {Leaning, LeaningSAM}


@pytest.mark.usefixtures("no_cuda")
@pytest.mark.parametrize(("case", "option", "executor"), one_in(4, STEPS, OPTIONS, ["threads", "vmap", "graph"]))
def test_executors_agree_or_refuse(case: str, option: str, executor: str) -> None:
    """Nothing is ignored: an executor trains as `sequential` does, or refuses the option by name."""
    if option == "optimizer" and case in REFUSED_BY_TORCH:
        with pytest.raises(ValueError, match=f"{REFUSED_BY_TORCH[case]} needs? one of the kernels' rules"):
            train(executor, case, option)
        return
    plain = plain_run(case, option)
    assert oracle.movement(plain.model, plain_run(case).model) > 1e-4
    if option == "optimizer" and executor in ("vmap", "graph"):
        with pytest.raises(ValueError, match=f"'{executor}' cannot serve here: .*{RULES}"):
            train(executor, case, option)
        return
    other_run = train(executor, case, option)
    if executor != "vmap":
        assert digest(other_run) == digest(plain)
    assert oracle.movement(plain.model, other_run.model) < 1e-4
