"""Radii that change from round to round: numbers, formulas, functions."""

from __future__ import annotations

import math
from dataclasses import fields

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastsam import fed
from fastsam.arena import Layout
from fastsam.fed.algorithms.schedule import check_scheduled, value_at
from fastsam.fed.step.model_copy import trainable

MODEL = torch.nn.Linear(1, 1)
ROWS = fed.Rows.of(MODEL, Layout.of(trainable(MODEL)))


def radii(made):
    """The options that take a schedule."""
    return {field.name for field in fields(made) if field.type == "Scheduled"}


RADIUS = [name for name, made in fed.algorithms.registry.items() if "rho" in radii(made)]


def at(index, lr=0.1, first_lr=0.2):
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
            found = value_at("rho", formula, at(t - 1, lr, first))
            assert math.isclose(found, expected(t, lr, first), rel_tol=1e-12, abs_tol=1e-15)


def test_schedules_start_and_end_where_they_say():
    for shape in ("linear", "cosine"):
        values = [value_at("rho", f"{shape}(0.3, 0.1, 10)", at(t)) for t in range(15)]
        assert values[0] == 0.3 and all(v == pytest.approx(0.1) for v in values[9:])
        assert values[:10] == sorted(values[:10], reverse=True) and len(set(values[:10])) == 10


@given(number=st.floats(0, 1e6), index=st.integers(0, 1000))
def test_a_number_is_itself_in_every_round(number, index):
    check_scheduled("rho", number)
    assert value_at("rho", number, at(index)) == number
    assert value_at("rho", repr(number), at(index)) == number
    assert value_at("rho", lambda round: number, at(index)) == number


@given(st.text(max_size=30))
def test_any_other_text_is_refused(text):
    """A formula is a number in the end, or a ValueError that shows what came: nothing else happens."""
    try:
        check_scheduled("rho", text)
        assert value_at("rho", text, at(3)) >= 0
    except ValueError as error:
        assert "rho" in str(error)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("0.1 - 0.1*round", r"rho in round 4 .*>= 0, got -0.3"),
        ("1/(round - 4)", "has no value in round 4: .*division by zero"),
        ("sqrt(3 - round)", "has no value in round 4"),
        ("10**(1000*round)", "has no value in round 4"),
        ("(-round)**0.5", "has no value in round 4"),
        ("linear(0.1, 0.2, 1)", "has no value in round 4: .*needs n >= 2, got 1"),
        (lambda round: -1.0, "rho in round 4 .*got -1.0"),
        (lambda round: "0.1", "rho in round 4 .*got '0.1'"),
    ],
)
def test_values_that_are_no_radius(value, words):
    check_scheduled("rho", value)
    with pytest.raises(ValueError, match=words):
        value_at("rho", value, at(3))


def problem():
    torch.manual_seed(1)
    return torch.nn.Linear(4, 3), [(torch.randn(n, 4), torch.arange(n) % 3) for n in (6, 9, 4)]


def final(algorithm, **options):
    model, clients = problem()
    steps = {"rounds": 3, "participation": 0.7, "lr": 0.2, "local_epochs": 2}
    result = fed.run(model, clients, algorithm, **{**steps, **options})
    return torch.cat([p.detach().flatten() for p in result.model.parameters()])


@pytest.mark.parametrize("name", RADIUS)
def test_every_radius_takes_a_schedule(name):
    """A schedule that is constant gives the bits of the number; one that changes gives others from its second round
    on."""
    made = fed.algorithms.registry[name]
    plain = final(made(rho=0.3))
    assert torch.equal(final(made(rho="0.1*3 + 0*lr")), final(made(rho=0.1 * 3)))
    assert torch.equal(final(made(rho=lambda round: 0.3)), plain)
    assert not torch.equal(final(made(rho="0.3/round")), plain)
    assert torch.equal(final(made(rho="0.3/round"), rounds=1), final(made(rho=0.3), rounds=1))
    if name != "fedgsam":
        assert torch.equal(
            final(made(rho="0.3*lr/first_lr"), lr_decay=0.5), final(made(rho="0.3*0.5**(round - 1)"), lr_decay=0.5)
        )


@settings(max_examples=5, deadline=None)
@given(t=st.integers(0, 50), decay=st.floats(0.8, 1), low=st.floats(0, 0.1), high=st.floats(0.1, 1))
def test_gsam_s_radius_falls_with_the_learning_rate(t, decay, low, high):
    made = fed.FedGSAM(rho=high, rho_min=low, lr_min=0.01)
    lr = 0.1 * decay**t
    assert math.isclose(made.radius(at(0, 0.1, 0.1)), high)
    if lr >= 0.01:
        assert low - 1e-12 <= made.radius(at(t, lr, 0.1)) <= high + 1e-12
    assert math.isclose(made.radius(at(t, 0.01, 0.1)), low, abs_tol=1e-12)


def test_a_schedule_that_fails_is_told_before_anything_is_written(tmp_path):
    with pytest.raises(ValueError, match="has no value in round 1"):
        final(fed.FedSAM(rho="1/(round - 1)"), run_dir=tmp_path / "run")
    assert not (tmp_path / "run").exists()
