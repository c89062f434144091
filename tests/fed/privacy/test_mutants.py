"""Are the checks of noise, clip and epsilon worth anything? Every wrong formula must fail one of them."""

from __future__ import annotations

import pytest

from tests.helpers import privacy_checks
from tests.helpers.mutants.apply import replaced
from tests.helpers.mutants.privacy import MUTANTS

ACCOUNTS = {"poisson", "without_replacement", "unsampled", "every_round"}


@pytest.mark.parametrize(
    "mutant",
    [pytest.param(m, marks=[pytest.mark.slow] * (m.case in ("poisson", "without_replacement"))) for m in MUTANTS],
    ids=[f"{m.case}: {m.function}: {m.new}" for m in MUTANTS],
)
def test_a_wrong_formula_is_noticed(mutant):
    if mutant.case in ACCOUNTS:
        pytest.importorskip("dp_accounting", reason="epsilon is computed by dp-accounting")
    with replaced(*mutant[:4]), pytest.raises(AssertionError):
        getattr(privacy_checks, mutant.case)()


def test_every_mutant_is_there_once():
    assert len(set(MUTANTS)) == len(MUTANTS)
