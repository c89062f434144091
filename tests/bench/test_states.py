"""The benchmark of clients with states runs, with and without files."""

from __future__ import annotations

from pathlib import Path

from bench.states import COHORT, seconds


def test_rounds_are_timed_once_everybody_has_a_state(tmp_path: Path) -> None:
    assert 0 < seconds(COHORT + 20, None, "disk") < 60
    assert 0 < seconds(COHORT + 20, str(tmp_path / "run")) < 60
