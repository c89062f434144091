"""Are the checks of noise, clip and epsilon worth anything? Every wrong formula must fail one of them."""

from __future__ import annotations

import pytest

from tests.helpers import privacy_checks
from tests.helpers.mutants.apply import replaced
from tests.helpers.mutants.privacy import MUTANTS

ACCOUNTS = {"poisson", "without_replacement", "unsampled", "every_round"}


@pytest.mark.parametrize(
    "mutant",
    [pytest.param(m, marks=[pytest.mark.slow] * (m.check in ("poisson", "without_replacement"))) for m in MUTANTS],
    ids=[f"{m.check}: {m.module}: {m.new}" for m in MUTANTS],
)
def test_a_wrong_formula_is_noticed(mutant):
    if mutant.check in ACCOUNTS:
        pytest.importorskip("dp_accounting", reason="epsilon is computed by dp-accounting")
    with replaced(f"fastsam.fed.{mutant.module}", mutant.old, mutant.new), pytest.raises(AssertionError):
        getattr(privacy_checks, mutant.check)()


def test_every_mutant_is_there_once():
    assert len(set(MUTANTS)) == len(MUTANTS)
