"""The benchmark of variants of one pass."""

from __future__ import annotations

import pytest

from bench import one_pass
from fastsam import MSAM

pytestmark = pytest.mark.slow


@pytest.mark.of_each_kind
def test_a_line_for_every_variant() -> None:
    rows = one_pass.rows("50 k", rounds=2)
    assert [row[1] for row in rows] == [f"`{name}`" for name in one_pass.VARIANTS]
    assert all(float(cell.split()[0]) > 0.5 for row in rows for cell in row[3:])


def test_nothing_is_timed_of_a_variant_that_trains_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one_pass, "MSAM", lambda rho: MSAM(1.0))
    with pytest.raises(AssertionError, match="not close"):
        one_pass.rows("50 k", rounds=1)
