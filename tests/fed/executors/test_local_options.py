"""Every option and every variant of a local step on every executor, in float32 and so also by row programs."""

import functools
from dataclasses import fields

import pytest
import torch

from fastsam import fed
from fastsam.fed.executors.task import STEP_OPTIONS
from fastsam.fed.update.variant import StepVariant
from tests.helpers import oracle
from tests.helpers.fed_runs import FLOAT, digest, run
from tests.helpers.fed_seam import Constants

OPTIONS = {
    "momentum": {"momentum": 0.7}, "weight_decay": {"weight_decay": 0.1}, "clip_norm": {"clip_norm": 0.2},
    "clip_scope": {"clip_norm": 0.2, "clip_scope": "linear"}, "optimizer": {"optimizer": torch.optim.Adadelta},
}  # fmt: skip


def w(row, layout):
    return row


def ones(row, layout):
    return layout.flatten({name: torch.ones_like(p) for name, p in layout.template.named_parameters()})


D = fed.Direction
VARIANTS = {
    "direction": {"direction": D.ADAPTIVE_GRADIENT, "rho": 0.3, "eta": 0.01},
    "has_q": {"gradient_offset": w},
    "has_phi": {"proximal_coefficient": 0.2},
    "keeps_first": {"direction": D.GRADIENT, "rho": 0.3, "perturbed_weight": 0.6, "clean_weight": 0.4},
    "surrogate": {"direction": D.GRADIENT, "rho": 0.3, "surrogate_gap": 0.3},
    "has_schedule": {"direction": D.GRADIENT, "rho": 0.3, "lr_end_factor": 0.5},
    "drift_weight": {"direction": D.PATH, "rho": 0.3, "direction_vector": w, "drift_weight": -1.0},
    "uses_last_gradient": {
        "direction": D.GRADIENT_PLUS,
        "rho": 0.3,
        "direction_vector": w,
        "uses_last_gradient": True,
    },
    "anchor_weight": {"direction": D.GRADIENT, "rho": 0.3, "anchor": ones, "anchor_weight": 0.3},
    "has_pilot": {"direction": D.GRADIENT, "pilot": fed.Pilot(1, lambda norms, gradients: 0.3 / (1 + norms))},
    "has_full_gradient": {"full_gradient": True},
    "has_start": {"start": w},
    "has_optimizer_state": {"optimizer_state": {}},
    "has_step_offset": {"step_offset": w},
}
SERVED_BY_TORCH = ("direction", "has_q", "has_phi", "has_full_gradient", "has_start", "has_optimizer_state")


def train(executor, update, **options):
    options = {"momentum": 0.0, "weight_decay": 0.0, **options}
    return run(Constants(update), executor, 3, oracle.smooth_model(FLOAT), lr=0.2, **options)


@functools.cache
def plain_run(variant, option=None):
    return train("sequential", VARIANTS[variant], **OPTIONS.get(option, {}))


def test_every_option_and_variant_has_a_case():
    assert {*OPTIONS} == STEP_OPTIONS
    assert {*VARIANTS} == {f.name for f in fields(StepVariant)}


@pytest.mark.parametrize("executor", ["threads", "vmap"])
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_executors_agree_or_refuse(variant, option, executor):
    """Nothing is ignored: an executor trains as `sequential` does, or refuses the option by name."""
    if option == "optimizer" and variant not in SERVED_BY_TORCH:
        with pytest.raises(ValueError, match="optimizer needs plain local steps, or steps of SAM"):
            train(executor, VARIANTS[variant], **OPTIONS[option])
        return
    plain = plain_run(variant, option)
    assert oracle.movement(plain.model, plain_run(variant).model) > 1e-4
    if (option, executor) == ("optimizer", "vmap"):
        with pytest.raises(ValueError, match="it serves the optimizers SGD, Adam, AdamW, Adagrad, RMSprop and Lion"):
            train(executor, VARIANTS[variant], **OPTIONS[option])
        return
    other_run = train(executor, VARIANTS[variant], **OPTIONS[option])
    if executor == "threads":
        assert digest(other_run) == digest(plain)
    assert oracle.movement(plain.model, other_run.model) < 1e-4
