"""Options of the algorithms: what is refused, in which words, and that every one of them changes something."""

from __future__ import annotations

import functools
import math
from dataclasses import fields

import pytest
import torch

from fastsam import fed
from fastsam.fed import models
from fastsam.fed.step.input_map import InputMap
from fastsam.lab import config
from tests.helpers.places import ROOT

DIGITS = ROOT / "examples" / "digits.toml"
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


BAD = [
    ("fedadam", {"beta1": 1.5}, "beta1 .*<= 1, got 1.5"),
    ("fedadam", {"beta2": -0.1}, "beta2 .*>= 0"),
    ("fedadam", {"tau": 0}, "tau .*> 0"),
    ("fedadam", {"V0": -1}, "V0 .*>= 0"),
    ("fedadam", {"bias_correction": "yes"}, "bias_correction must be one of True, False"),
    ("fedadam", {"bias_correction": True, "V0": 0.1}, "bias_correction .*needs V0 = 0"),
    ("fedadam", {"bias_correction": True, "beta1": 1.0}, "beta1, beta2 < 1"),
    ("fedrobust", {"lam": -1}, "lam .*>= 0"),
    ("fedrobust", {"eta_2": -1}, "eta_2 .*>= 0"),
    ("fedrobust", {"ascent_steps": 0}, "ascent_steps must be an integer >= 1"),
    ("fedrobust", {"form": "rows"}, "form must be one of 'full', 'channel', 'diag', None"),
    ("fedrobust", {"radius": 0.1}, r"radius must be two numbers \[e1, e2\].*got 0.1"),
    ("fedrobust", {"radius": (0.1,)}, "radius must be two numbers"),
    ("fedrobust", {"radius": "0.1,0.2"}, "radius must be two numbers"),
    ("fedrobust", {"radius": (0.1, -0.1)}, r"radius\[1\] .*>= 0"),
    ("fedcm", {"alpha": 1.1}, "alpha .*<= 1, got 1.1"),
    ("fedcm", {"momentum_K": "rounds"}, "'steps', 'epochs'.*'rounds'"),
    ("mimelite", {"beta": -0.1}, "beta .*>= 0"),
    ("fedscam", {"kappa": -1}, "kappa .*>= 0"),
    ("fedscam", {"pilots": 0}, "pilots must be an integer >= 1"),
    ("mimelite", {"momentum_form": "nesterov"}, "'convex', 'heavy_ball'"),
    ("feddyn", {"phi": -1}, "phi .*>= 0"),
    ("feddyn", {"phi_decay": 0}, "phi_decay .*> 0"),
    ("fedprox", {"phi": math.inf}, "phi must be a finite number"),
    ("fedgsam", {"alpha": -0.1}, "alpha .*>= 0"),
    ("fedgsam", {"rho_min": -0.1}, "rho_min .*>= 0"),
    ("fedgsam", {"lr_min": 0.1}, "lr_min belongs to rho_min"),
    ("mofedsam", {"beta": 1.1}, "beta .*<= 1"),
    ("fedsmoo", {"alpha": 0}, "alpha .*> 0"),
    ("fedsmoo", {"s_rule": "mean"}, "'paper', 'mu_active', 'mu_all'.*'mean'"),
    ("fedsmoo", {"dyn": 1}, "dyn must be one of True, False"),
    ("fedspeed", {"alpha": 1.5}, "alpha .*<= 1"),
    ("fednsam", {"perturb": "dual"}, "'gradient', 'momentum'.*'dual'"),
    ("fedlesam", {"first": "zero"}, "'origin', 'none'.*'zero'"),
    ("fedlesam-s", {"ref": "server"}, "'client', 'last_round'.*'server'"),
    ("fedlesam-s", {"control_scale": -1}, "control_scale .*>= 0"),
    ("fedlesam-d", {"phi": math.nan}, "phi"),
    ("centralised-sam", {"eta": 0.1}, "adaptive=True"),
]


@pytest.mark.parametrize(("name", "options", "words"), BAD)
def test_values_outside_their_range(name, options, words):
    with pytest.raises(ValueError, match=words):
        REGISTRY[name](**options)


@pytest.mark.parametrize("name", [name for name, made in REGISTRY.items() if "rho" in made.__dataclass_fields__])
@pytest.mark.parametrize("rho", [-0.1, math.nan, "a lot", None, [0.1]])
def test_every_radius_is_checked(name, rho):
    with pytest.raises(ValueError, match="rho"):
        REGISTRY[name](rho=rho)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: fed.FedSAM(roh=0.1),
            r"FedSAM has no option 'roh' \(did you mean 'rho'\?\); its options: rho, adaptive, eta",
        ),
        (lambda: fed.FedDyn(alpha=0.1), "FedDyn has no option 'alpha'.*its options: phi, phi_decay"),
        (lambda: fed.FedAvg(rho=0.1), "FedAvg has no option 'rho'; its options: none"),
    ],
)
def test_options_of_another_algorithm_in_python(make, words):
    with pytest.raises(TypeError, match=words):
        make()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (
            ["--algorithm", "feddyn", "--beta", "0.1"],
            r"beta is an option of fedavgm, fedntd, fedscam, fedtoga, mimelite, mofedsam, not of feddyn",
        ),
        (["--algorithm", "fedlesam-s", "--fedlesam-s.phi", "0.1"], "phi is an option of feddyn"),
        (["--algorithm", "fedlesam-s", "--control-scal", "0.1"], "did you mean 'control_scale'"),
        (["--algorithm", "fedlesam_s"], r"unknown algorithm 'fedlesam_s' \(did you mean 'fedlesam-s'\?\)"),
        (["--algorithm", "fedcm", "--fedcm.alpha", "1.5"], "alpha .*<= 1"),
        (["--algorithm", "fedadam", "--bias-correction", "maybe"], "bias_correction must be bool, got 'maybe'"),
        (["--algorithm", "fedsam", "--rho", "0.1*lrr"], "'lrr' is not known; names are round, lr, first_lr"),
    ],
)
def test_options_on_the_command_line(flags, words):
    with pytest.raises(ValueError, match=words):
        config.resolve(config.read(DIGITS, flags))


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


def test_fedrobust_needs_numbers_as_inputs():
    model = torch.nn.Sequential(torch.nn.Embedding(7, 4), torch.nn.Flatten(), torch.nn.Linear(8, 2))
    clients = [(torch.randint(0, 7, (5, 2)), torch.arange(5) % 2)]
    with pytest.raises(ValueError, match="floating-point inputs, got torch.int64"):
        fed.run(model, clients, fed.FedRobust(), rounds=1)


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


def test_input_maps_are_checked():
    for options, words in (
        ({"form": "rows"}, "form"),
        ({"lam": -1.0}, "lam"),
        ({"lr": math.nan}, "lr"),
        ({"steps": 0}, "steps"),
        ({"radius": (0.1, -1.0)}, "radius: e2"),
    ):
        with pytest.raises(ValueError, match=words):
            InputMap(**options)
    with pytest.raises(ValueError, match="call begin"):
        InputMap().apply(torch.zeros(2, 3))
