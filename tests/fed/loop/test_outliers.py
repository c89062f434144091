"""A client that moves far beyond its cohort is named once in the log and in every record, and nothing else changes."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fastsam import fed
from fastsam.fed.loop.outliers import FAR, outliers
from tests.helpers import oracle
from tests.helpers.fed_runs import FLOAT

SIZES = (8, 8, 8, 8, 8, 8)


def data(poison: float = 1.0, sizes: tuple[int, ...] = SIZES) -> list[Any]:
    """The samples of client 3 are multiplied by `poison`."""
    return [(x * poison if i == 3 else x, y) for i, (x, y) in enumerate(oracle.ragged_clients(FLOAT, sizes))]


def train(clients: list[Any], algorithm: fed.Algorithm | None = None, **options: Any) -> fed.Result:
    torch.manual_seed(0)
    base: dict[str, Any] = {"rounds": 3, "participation": 1.0, "batch_size": 4, "executor": "sequential"}
    return fed.run(nn.Linear(6, 3), clients, algorithm or fed.FedAvg(), **(base | options))


def warned(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name == "fastsam.fed" and "times as far" in r.getMessage()]


@pytest.mark.parametrize(("executor", "slots"), [("sequential", None), ("threads", 2), ("vmap", 4)])
def test_it_is_named_once_and_recorded_in_every_round(
    caplog: pytest.LogCaptureFixture, executor: str, slots: Any
) -> None:
    result = train(data(1e6), executor=executor, slots=slots)
    (line,) = warned(caplog)
    assert re.match(
        r"round 1: client 3 moved [\d.]+e\+0\d times as far as the median of its cohort, .*aggregation='norm_filter'",
        line,
    )
    assert caplog.records[-1].levelno == logging.WARNING
    assert [[one["client"] for one in r["outliers"]] for r in result.history] == [[3]] * 3
    factor = result.history[0]["outliers"][0]["factor"]
    assert f"{factor:.3g}" in line and factor > 1e3


def test_an_ordinary_cohort_is_not_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    result = train(data(), fed.SCAFFOLD())
    assert warned(caplog) == [] and [r["outliers"] for r in result.history] == [[]] * 3


def test_a_resumed_run_does_not_say_it_again(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    train(data(1e6), rounds=1, run_dir=tmp_path / "run")
    assert len(warned(caplog)) == 1
    train(data(1e6), rounds=2, run_dir=tmp_path / "run", resume=True)
    assert len(warned(caplog)) == 1


def test_with_a_robust_rule_it_says_what_stands_against_it(caplog: pytest.LogCaptureFixture) -> None:
    train(data(1e6), aggregation="median")
    (line,) = warned(caplog)
    assert line.endswith("against which aggregation='median' stands")


def test_what_was_shortened_or_excluded_is_none(caplog: pytest.LogCaptureFixture) -> None:
    assert train(data(1e6), clip_update=0.1).history[0]["outliers"] == []
    result = train(data(1e38))
    assert result.history[0]["outliers"] == [] and result.history[0]["excluded"][0]["client"] == 3
    assert warned(caplog) == []


def test_the_limit() -> None:
    steps, norms = dict.fromkeys(range(5), 2), dict.fromkeys(range(5), 1.0)
    assert outliers({**norms, 2: FAR}, steps) == {}
    assert outliers({**norms, 2: FAR + 1, 0: 2 * FAR}, steps) == {0: 2 * FAR, 2: FAR + 1}
    assert outliers({**norms, 2: 3 * FAR}, {**steps, 2: 6}) == {}  # three times as many steps
    assert outliers({**norms, 2: FAR + 1}, {**steps, 2: 1}) == {2: FAR + 1}  # fewer steps are no excuse, and no charge
    assert outliers({0: 1.0, 1: 1e9}, steps) == {}  # of two nobody knows which
    assert outliers({0: 1.0, 1: 1e9, 2: 1.0}, steps) == {1: 1e9}
    assert outliers({**dict.fromkeys(range(5), 0.0), 2: 1.0}, steps) == {}
