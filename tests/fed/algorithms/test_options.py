"""Options of the algorithms: what is refused, in which words, and that every one of them changes something."""

from __future__ import annotations

import functools
import math
from dataclasses import fields

import pytest
import torch

from fastsam import fed
from fastsam.fed import models
from fastsam.lab import config

REGISTRY = fed.algorithms.registry

# Another value than the default for every option of every algorithm.
OTHER = {
    "rho": 0.9, "alpha": 0.35, "beta": 0.35, "phi": 0.55, "beta1": 0.3, "beta2": 0.4, "tau": 0.4, "V0": 0.2,
    "bias_correction": True,
    "lam": 0.1, "eta_2": 0.7, "ascent_steps": 3, "form": "diag", "radius": [0.02, 0.01], "momentum_K": "epochs",
    "momentum_form": "heavy_ball", "phi_decay": 0.5, "adaptive": True, "rho_min": 0.01, "s_rule": "mu_active",
    "dyn": False, "first": "none",
    "ref": "last_round", "control_scale": 0.3, "eps": 1e-9, "rho_local": 0.9, "gamma": 0.2, "average": False,
    "head": "0", "head_epochs": 1, "epochs": 1, "mu": 3.0, "features": "0", "K": 2, "perturb": "momentum",
    "threshold": 0.0, "pilots": 1,
}  # fmt: skip
NEEDS = {
    "eta": {"adaptive": True, "eta": 0.3}, "lr_min": {"rho_min": 0.01, "lr_min": 0.05},
    "rho_g": {"threshold": 0.0, "rho_g": 0.3}, "window": {"threshold": 0.145, "window": 1},
}  # fmt: skip
CASES = [(name, field.name) for name, made in REGISTRY.items() for field in fields(made)]


def problem():
    torch.manual_seed(2)
    model = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3)).double()
    return model, [(torch.randn(n, 4, dtype=torch.float64), torch.arange(n) % 3) for n in (6, 9, 4, 11)]


def final(algorithm, **options):
    model, clients = problem()
    keywords = {"rounds": 4, "participation": 0.6, "lr": 0.1, "lr_decay": 0.8, "batch_size": 4, "local_epochs": 2}
    result = fed.run(model, clients, algorithm, **{**keywords, **options})
    models = [result.model]
    if algorithm.own_models:
        models += [result.client_model(i) for i in range(len(clients))]
    return torch.cat([p.detach().flatten() for model in models for p in model.parameters()])


@functools.cache
def of_defaults(name):
    return final(REGISTRY[name]())


@pytest.mark.parametrize(
    ("name", "option"), [pytest.param(*case, marks=pytest.mark.slow if i % 2 else []) for i, case in enumerate(CASES)]
)
def test_every_option_has_an_effect(name, option):
    needed = {} if name == "pfedme" else NEEDS  # whose eta is a rate
    made, changed = REGISTRY[name], needed.get(option, {option: OTHER.get(option, 0.3)})
    default = {key: value for key, value in changed.items() if key != option}
    assert not torch.equal(final(made(**changed)), final(made(**default)) if default else of_defaults(name))


@pytest.mark.parametrize("rule", ["mu_active", "mu_all"])
def test_the_rules_for_s_differ(rule):
    assert not torch.equal(final(fed.FedSMOO(rho=0.5, s_rule=rule)), final(fed.FedSMOO(rho=0.5)))


@pytest.mark.parametrize("name", [name for name, made in REGISTRY.items() if "rho" in made.__dataclass_fields__])
@pytest.mark.parametrize("rho", [-0.1, math.nan, "a lot", None, [0.1]])
def test_every_radius_is_checked(name, rho):
    with pytest.raises(ValueError, match="rho"):
        REGISTRY[name](rho=rho)


@pytest.mark.parametrize("name", list(REGISTRY))
def test_a_record_gives_the_same_algorithm_again(name):
    """Every option, changed, through the command line's file and back."""
    changed = {f.name: OTHER[f.name] for f in fields(REGISTRY[name]) if f.name in OTHER}
    if name == "fedadam":
        changed.pop("V0")
    resolved = config.resolve(config.Source({"algorithm": name}, {name: changed}))
    again = config.resolve(config.Source(*_split(resolved.record())))
    assert again == resolved
    assert REGISTRY[name](**resolved.options) == REGISTRY[name](**changed)
    assert hash(REGISTRY[name](**resolved.options)) == hash(REGISTRY[name](**changed))


def _split(record):
    """Keys and tables, as reading a file does."""
    tables = {key: record[key] for key in REGISTRY if key in record}
    return {key: value for key, value in record.items() if key not in tables}, tables


@pytest.mark.parametrize("made", [fed.FedDyn, fed.FedLESAM_D, fed.FedSMOO])
def test_a_server_without_a_learning_rate_refuses_one(made, tmp_path):
    with pytest.raises(
        ValueError, match=f"step of {made.__name__} has no learning rate: leave server_lr at 1, got 0.5"
    ):
        final(made(), server_lr=0.5, run_dir=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_gsam_s_lowest_learning_rate_is_below_the_first(tmp_path):
    with pytest.raises(ValueError, match="lr_min must be below the run's first lr, 0.2; got 0.3"):
        final(fed.FedGSAM(rho_min=0.01, lr_min=0.3), lr=0.2, run_dir=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    with pytest.raises(ValueError, match="rho in round 3 .*got -0.21"):
        final(fed.FedGSAM(rho=0.5, rho_min=0.0, lr_min=0.15), lr=0.2)


@pytest.mark.parametrize(("form", "ascent_steps"), [("full", 2), (None, 1), ("channel", 1)])
def test_fedrobust_maps_the_normalised_numbers_of_bytes(form, ascent_steps):
    """Images of bytes behind `Pixels` train like the same images that were normalised before, to the bit."""
    generator = torch.Generator().manual_seed(3)
    images = [
        (torch.randint(0, 256, (n, 3, 4, 4), dtype=torch.uint8, generator=generator), torch.arange(n) % 2)
        for n in (5, 9)
    ]
    inner = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(48, 2))
    wrapped = models.Pixels(inner, (0.5, 0.4, 0.3), (0.2, 0.3, 0.25))
    method = fed.FedRobust(form=form, ascent_steps=ascent_steps, eta_2=0.1)
    options = {"rounds": 2, "batch_size": 4, "lr": 0.1, "executor": "sequential"}
    ours = fed.run(wrapped, images, method, **options).model.model
    floats = [(wrapped.normalised(x), y) for x, y in images]
    theirs = fed.run(inner, floats, method, **options).model
    at_rest = fed.run(wrapped, images, fed.FedAvg(), **options).model.model
    for a, b, c in zip(ours.parameters(), theirs.parameters(), at_rest.parameters(), strict=True):
        assert torch.equal(a, b) and not torch.equal(a, c)
    with pytest.raises(
        ValueError, match=r"got torch.uint8; for images of bytes the model must be a fastsam.fed.models.Pixels"
    ):
        fed.run(torch.nn.Sequential(wrapped), images, method, **options)
