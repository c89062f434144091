"""Is the comparison with the unfused loop worth anything? Every wrong constant must fail it."""

from __future__ import annotations

import math

import pytest
import torch

from tests.helpers import oracle
from tests.helpers.fed_cases import METHODS, options_of, ours, replayed, unfused
from tests.helpers.mutants.apply import Stale, replaced
from tests.helpers.mutants.table import MUTANTS

NOTICED = 1e-11  # ten times what the comparison in float64 allows


def distance(case, options, backend="reference"):
    """How far the implementation, as it now is in memory, ends from the oracle."""
    final = replayed(
        oracle.smooth_model(), oracle.ragged_clients(), ours(case), options_of(case, options), backend=backend
    )
    return oracle.difference(final.model, unfused(case, options, torch.float64))


USUAL = {METHODS[m.case][0]: m for m in MUTANTS}.values()  # in `make test` the last one of each algorithm


@pytest.mark.parametrize(
    "mutant",
    [pytest.param(m, marks=[] if m in USUAL else pytest.mark.slow) for m in MUTANTS],
    ids=lambda m: f"{m.case}: {m.function}: {m.new}",
)
def test_a_wrong_constant_is_noticed(mutant):
    with replaced(*mutant[:4]):
        # The fused kernels take half the time of the reference, and are no part of what is changed elsewhere.
        far = distance(
            mutant.case, mutant.options, "reference" if mutant.module.startswith("fastsam_kernels") else "auto"
        )
    assert math.isnan(far) or far > NOTICED


def test_what_was_replaced_is_back():
    for case in ("fedavg", "feddyn", "fedsmoo", "fedgsam", "fedlesam"):
        assert distance(case, "decay") < 1e-12


def test_every_algorithm_has_mutants():
    assert {METHODS[m.case][0] for m in MUTANTS} == {name for name, _ in METHODS.values()}
    assert len(set(MUTANTS)) == len(MUTANTS)


@pytest.mark.parametrize(
    ("function", "old", "words"),
    [
        ("FedProx.local_step", "no_such_text", "0 times"),
        ("FedProx.local_step", "self", "[2-9] times"),
        ("FedProx.no_such", "self.phi", "no function"),
    ],
)
def test_a_mutant_that_does_not_fit_is_an_error(function, old, words):
    with pytest.raises(Stale, match=words), replaced("algorithms.fedprox", function, old, "0.0"):
        raise AssertionError("replaced something")
