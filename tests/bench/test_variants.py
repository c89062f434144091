"""The predictions and the rule of bench/variants, which stand before any GPU has run them, and its command line."""

from __future__ import annotations

from typing import Any

import pytest

from bench.variants import report
from bench.variants.__main__ import parse
from bench.variants.cases import CASES, Device
from bench.variants.library import Dependent, OneRead

H200 = Device(4.2e12, 50 << 20, 132)


def result(group: str, rows: int, ratio: float | None, gate: str = "green") -> dict[str, Any]:
    summary = None if ratio is None else {"median": ratio, "q1": ratio, "q3": ratio}
    return {"group": group, "rows": rows, "title": f"{rows} rows", "ratio": summary, "gate": gate}


def test_the_cases_are_those_that_decide() -> None:
    rows, models = ([c.kernels.size for c in CASES if c.variant is variant] for variant in (OneRead, Dependent))
    assert rows[0].rows == report.DECISIVE_ROWS, "what decides comes first"
    assert {(size.rows, len(str(size.parameters // size.rows))) for size in rows} == {
        (1, 5), (8, 5), (32, 5), (100, 5), (400, 5), (100, 4),
    }  # fmt: skip
    assert [len(str(size.parameters)) for size in models] == [5, 4, 8] and {size.rows for size in models} == {1}
    assert len({c.name for c in CASES}) == len(CASES)


def test_predictions_follow_from_bytes_and_launches() -> None:
    """Many rows: 12 bytes of 16 (of 13.6 from the cache) and a launch less; a few rows leave most of the device
    idle."""
    one_read = {c.name: c.predict(c.kernels.size, H200) for c in CASES}
    assert 0.72 < one_read["one read, 400 rows of 50 k"] < 0.78 < one_read["one read, 100 rows of 50 k"] < 0.85
    assert one_read["one read, 1 row of 50 k"] > 2 > one_read["one read, 32 rows of 50 k"] > 1
    assert 0.5 < one_read["one read, 100 rows of 2.4 k"] < one_read["one read, 100 rows of 10 k"] < 0.75


def test_a_launch_that_is_half_hidden_counts_where_launches_do() -> None:
    dependent = [c.predict(c.kernels.size, H200) for c in CASES if c.variant is Dependent]
    assert 0.74 < dependent[1] < dependent[0] < 0.8 and 0.97 < dependent[2] < 1


@pytest.mark.of_each_kind
@pytest.mark.parametrize(
    ("group", "figures", "expected"),
    [
        ("one read", [(100, 0.8), (400, 0.75), (32, 1.1), (8, 2.0)], "keep, from 100 rows on"),
        ("one read", [(100, 0.8), (400, 0.75), (32, 1.0), (8, 2.0)], "keep, from 32 rows on"),
        ("one read", [(100, 0.8), (400, 1.03)], "drop"),
        ("one read", [(100, 0.96), (400, 0.75)], "drop"),
        ("one read", [(100, None), (400, 0.75)], "not measured"),
        ("one read", [(100, None)], "not measured"),
        ("dependent", [(1, 0.8), (1, 0.95), (1, 1.01)], "keep"),
        ("dependent", [(1, 0.96), (1, 0.7)], "drop"),
        ("dependent", [(1, 0.8), (1, 1.03)], "drop"),
    ],
)
def test_the_rule(group: str, figures: list[tuple[int, float | None]], expected: str) -> None:
    results = [result(group, rows, ratio) for rows, ratio in figures]
    assert report.verdict(group, [result("another", 1, 5.0), *results]) == expected
    assert report.verdict(group, [*results, result(group, 1, None, "red")]) == "drop: it was wrong"


def test_the_command_needs_a_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    for arguments, said in ((["--device", "cpu"], "got --device cpu"), ([], "torch sees no CUDA device")):
        with pytest.raises(SystemExit):
            parse([*arguments, "--out", "somewhere"])
        assert said in capsys.readouterr().err
