"""Options of the algorithms: refused values with their messages, and an effect of every option."""

import functools
import math
from dataclasses import fields

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fastsam import fed
from fastsam.arena import Layout
from fastsam.fed import models
from fastsam.fed.algorithms.schedule import check_scheduled, value_at
from fastsam.fed.update.model_copy import trainable
from fastsam.lab import config
from tests.helpers import oracle

REGISTRY = fed.algorithms.registry

# Another value than the default for every option of every algorithm.
OTHER = {
    "rho": 0.9, "alpha": 0.35, "beta": 0.35, "phi": 0.55, "beta1": 0.3, "beta2": 0.4, "tau": 0.4, "V0": 0.2,
    "bias_correction": True,
    "lam": 0.1, "eta_2": 0.7, "ascent_steps": 3, "form": "diag", "radius": [0.02, 0.01], "momentum_K": "epochs",
    "momentum_form": "heavy_ball", "phi_decay": 0.5, "adaptive": True, "rho_min": 0.01, "s_rule": "mu_active",
    "dyn": False, "initial_perturbation": "none",
    "reference": "last_round", "control_scale": 0.3, "eps": 1e-9, "rho_local": 0.9, "gamma": 0.2, "average": False,
    "head": "0", "head_epochs": 1, "epochs": 1, "mu": 3.0, "features": "0", "K": 2, "perturb": "momentum",
    "threshold": 0.0, "pilots": 1,
}  # fmt: skip
NEEDS = {
    "eta": {"adaptive": True, "eta": 0.3}, "lr_min": {"rho_min": 0.01, "lr_min": 0.05},
    "rho_g": {"threshold": 0.0, "rho_g": 0.3}, "window": {"threshold": 0.145, "window": 1},
}  # fmt: skip
CASES = [(name, field.name) for name, cls in REGISTRY.items() for field in fields(cls)]


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
    needed_options = {} if name == "pfedme" else NEEDS  # its eta is a learning rate
    cls, changes = REGISTRY[name], needed_options.get(option, {option: OTHER.get(option, 0.3)})
    default = {key: value for key, value in changes.items() if key != option}
    assert not torch.equal(final(cls(**changes)), final(cls(**default)) if default else of_defaults(name))


@pytest.mark.parametrize("name", [name for name, cls in REGISTRY.items() if "rho" in cls.__dataclass_fields__])
@pytest.mark.parametrize("rho", [-0.1, math.nan, "a lot", None, [0.1]])
def test_every_radius_is_checked(name, rho):
    with pytest.raises(ValueError, match="rho"):
        REGISTRY[name](rho=rho)


@pytest.mark.parametrize("name", list(REGISTRY))
def test_a_record_gives_the_same_algorithm_again(name):
    """Every option, changed, through the command line's file and back."""
    changes = {f.name: OTHER[f.name] for f in fields(REGISTRY[name]) if f.name in OTHER}
    if name == "fedadam":
        changes.pop("V0")
    resolved_config = config.resolve(config.ConfigSource({"algorithm": name}, {name: changes}))
    repeat = config.resolve(config.ConfigSource(*_split(resolved_config.record())))
    assert repeat == resolved_config
    assert REGISTRY[name](**resolved_config.options) == REGISTRY[name](**changes)
    assert hash(REGISTRY[name](**resolved_config.options)) == hash(REGISTRY[name](**changes))


def _split(record):
    """Keys and tables, as reading a file does."""
    tables = {key: record[key] for key in REGISTRY if key in record}
    return {key: value for key, value in record.items() if key not in tables}, tables


@pytest.mark.parametrize(("form", "ascent_steps"), [("full", 2), (None, 1), ("channel", 1)])
def test_fedrobust_maps_the_normalised_numbers_of_bytes(form, ascent_steps):
    """Images of bytes with `Pixels` train like images that were normalised before, bit for bit."""
    generator = torch.Generator().manual_seed(3)
    draw = torch.randint(0, 256, (14, 3, 4, 4), dtype=torch.uint8, generator=generator)
    images = [(x, torch.arange(len(x)) % 2) for x in draw.split([5, 9])]
    inner = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(48, 2))
    pixel_model = models.Pixels(inner, (0.5, 0.4, 0.3), (0.2, 0.3, 0.25))
    method = fed.FedRobust(form=form, ascent_steps=ascent_steps, eta_2=0.1)
    options = {"rounds": 2, "batch_size": 4, "lr": 0.1, "executor": "sequential"}
    actual = fed.run(pixel_model, images, method, **options).model.model
    floats = [(pixel_model.normalise(x), y) for x, y in images]
    expected = fed.run(inner, floats, method, **options).model
    at_rest = fed.run(pixel_model, images, fed.FedAvg(), **options).model.model
    for a, b, c in zip(actual.parameters(), expected.parameters(), at_rest.parameters(), strict=True):
        assert torch.equal(a, b) and not torch.equal(a, c)
    with pytest.raises(ValueError, match=r"got torch.uint8; for images of bytes .* be a fastsam.fed.models.Pixels"):
        fed.run(torch.nn.Sequential(pixel_model), images, method, **options)


# --- What single algorithms do, seen from outside, and what they refuse; test_fed_oracle.py has the numbers of all of
# them.


def test_a_zero_gradient_is_not_perturbed():
    """eps = 0 exactly where there is no direction: no NaN, and weight decay still acts."""
    model = oracle.smooth_model()
    final = fed.run(
        model, oracle.ragged_clients(), fed.FedSAM(rho=0.5), rounds=1, loss=lambda out, y: 0.0 * out.sum(),
        weight_decay=0.1, lr=0.1,
        participation=1.0, batch_size=100,
    ).model  # fmt: skip
    for p, q in zip(final.parameters(), model.parameters()):
        torch.testing.assert_close(p.detach(), 0.99 * q.detach(), rtol=1e-14, atol=0)


def test_the_registry_names_every_algorithm():
    assert len(fed.algorithms.registry) == 42
    for name, cls in fed.algorithms.registry.items():
        assert cls.__name__.lower().replace("_", "-") == name
        assert getattr(fed, cls.__name__) is cls
        assert cls() == cls()  # frozen dataclasses with defaults
        with pytest.raises(AttributeError):
            cls().rho = 1


# --- Radii that change from round to round: numbers, formulas, functions.


MODEL = torch.nn.Linear(1, 1)
ROWS = fed.ParameterLayout.from_model(MODEL, Layout.from_tensors(trainable(MODEL)))


def radii(cls):
    """The options that take a schedule."""
    return {field.name for field in fields(cls) if field.type == "Scheduled"}


RADIUS = [name for name, cls in fed.algorithms.registry.items() if "rho" in radii(cls)]


def rate_at(index, lr=0.1, first_lr=0.2):
    """Round `index`, counted from 0."""
    return fed.Round(index, lr, 1, 10, 2, 1.0, first_lr, ROWS)


@pytest.mark.parametrize(
    ("formula", "expected"),
    [
        ("0.3", lambda t, lr, first: 0.3),
        ("0.5/sqrt(round)", lambda t, lr, first: 0.5 / math.sqrt(t)),
        (" 0.5 / sqrt( 800 ) ", lambda t, lr, first: 0.5 / math.sqrt(800)),
        ("0.1*lr", lambda t, lr, first: 0.1 * lr),
        ("0.1 + 0.2*lr/first_lr - 0.05", lambda t, lr, first: 0.1 + 0.2 * lr / first - 0.05),
        ("2**-round", lambda t, lr, first: 2.0**-t),
        ("-(-1)/(round + 1)", lambda t, lr, first: 1 / (t + 1)),
        ("exp(-round) * log(3)", lambda t, lr, first: math.exp(-t) * math.log(3)),
        ("min(0.2, 1/round, lr)", lambda t, lr, first: min(0.2, 1 / t, lr)),
        ("max(0.01, 0.1*(1 - round/5))", lambda t, lr, first: max(0.01, 0.1 * (1 - t / 5))),
        ("linear(0.2, 0.1, 5)", lambda t, lr, first: 0.2 - 0.1 * min(t - 1, 4) / 4),
        ("cosine(0.2, 0, 5)", lambda t, lr, first: 0.1 * (1 + math.cos(math.pi * min(t - 1, 4) / 4))),
    ],
)
def test_formulas(formula, expected):
    check_scheduled("rho", formula)
    for t in (1, 2, 4, 5, 6, 900):
        for lr, first in ((0.1, 0.2), (0.03, 0.03)):
            result = value_at("rho", formula, rate_at(t - 1, lr, first))
            assert math.isclose(result, expected(t, lr, first), rel_tol=1e-12, abs_tol=1e-15)


@given(st.text(max_size=30))
def test_any_other_text_is_refused(text):
    """A formula is a number in the end, or a ValueError that shows what came: nothing else happens."""
    try:
        check_scheduled("rho", text)
        assert value_at("rho", text, rate_at(3)) >= 0
    except ValueError as error:
        assert "rho" in str(error)


@pytest.mark.parametrize("name", RADIUS)
def test_every_radius_takes_a_schedule(name):
    """A constant schedule gives the bits of the number; a changing one differs from its second round."""
    cls = fed.algorithms.registry[name]
    plain = final(cls(rho=0.3))
    assert torch.equal(final(cls(rho="0.1*3 + 0*lr")), final(cls(rho=0.1 * 3)))
    assert torch.equal(final(cls(rho=lambda round: 0.3)), plain)
    assert not torch.equal(final(cls(rho="0.3/round")), plain)
    assert torch.equal(final(cls(rho="0.3/round"), rounds=1), final(cls(rho=0.3), rounds=1))
    if name != "fedgsam":
        assert torch.equal(
            final(cls(rho="0.3*lr/first_lr"), lr_decay=0.5),
            final(cls(rho="0.3*0.5**(round - 1)"), lr_decay=0.5),
        )
