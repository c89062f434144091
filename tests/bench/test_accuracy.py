"""The table of what variants are worth: its tasks and statistics, by numbers made by hand, and the page."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.accuracy import __main__ as program
from bench.accuracy import report
from bench.accuracy.contenders import contenders
from bench.accuracy.report import Difference
from bench.accuracy.tasks import TASKS, corrupted
from bench.accuracy.training import Trial, run, tune
from fastsam import variants

pytestmark = pytest.mark.of_each_kind


def _row(accuracy: list[float], steps: int = 10) -> dict[str, Any]:
    one = {"steps": steps, "accuracy": accuracy, "sharpness": [0.25] * len(accuracy)}
    return {
        "second": "rho",
        "grid": [{"lr": 0.1, "value": 0.05, "validation": 0.5}],
        "steps": one,
        "time": {**one, "steps": 5},
    }


def _record() -> dict[str, Any]:
    rows = {
        "SGD": _row([0.50, 0.60, 0.70]),
        "SAM": _row([0.60, 0.70, 0.81]),
        "MSAM": _row([0.40, 0.50, 0.59]),
        "GSAM": _row([0.52, 0.58, 0.71]),
    }
    task = {"title": "one", "noise": 0.0, "train": 7, "steps": 10, "lrs": [0.1], "variants": rows}
    task["step_of_sgd"] = {"SGD": 1.0, "SAM": 2.0, "MSAM": 1.0, "GSAM": 2.5}
    machine = {"cpu": "a processor", "cores": 2}
    facts = {
        "command": "python -m bench.accuracy",
        "date": "2026-01-02T",
        "commit": "0123456789abcdef",
        "machine": machine,
    }
    settings = {"seeds": [0, 1, 2], "tuning_seeds": [9], "momentum": 0.9, "weight_decay": 0.0}
    return {
        "environment": {**facts, "versions": {"python": "3", "torch": "2"}},
        "continued": [],
        "settings": {**settings, "radius": 0.1},
        "tasks": {
            "a": task,
            "b": {**task, "title": "two", "noise": 0.4},
            "c": {**task, "title": "three", "noise": 0.2},
        },
    }


def test_paired_differences_by_hand() -> None:
    found = Difference.of([3.0, 5.0, 10.0], [2.0, 3.0, 4.0])  # 1, 2, 6: deviations -2, -1, 3
    assert found.mean == 3.0
    assert found.error == pytest.approx(math.sqrt(7 / 3))
    both = Difference.mean_of([Difference(1.0, 0.3), Difference(3.0, 0.4)])
    assert (both.mean, both.error) == (2.0, pytest.approx(0.25))


@pytest.mark.parametrize(
    ("mean", "verdict"), [(2.1, "better"), (-2.1, "worse"), (2.0, "no difference shown"), (-1.9, "no difference shown")]
)
def test_a_difference_within_two_errors_is_none(mean: float, verdict: str) -> None:
    assert Difference(mean, 1.0).verdict == verdict


def test_every_variant_takes_part_with_as_many_trials() -> None:
    found = contenders()
    kinds = {type(c.make(c.values[0])) for c in found.values() if c.make}
    all_of_them = {getattr(variants, name) for name in variants.__all__} - {variants.LESAM}
    assert kinds == all_of_them
    assert {len(c.values) for c in found.values()} == {3}


def test_wrong_labels_are_wrong_and_as_many_as_said() -> None:
    labels = torch.arange(10).repeat(10)
    made = corrupted(labels, 10, 0.4, torch.Generator().manual_seed(0))
    assert int((made != labels).sum()) == 40
    assert set(made.tolist()) == set(range(10))


@pytest.mark.parametrize("name", [n if n == "images-noise" else pytest.param(n, marks=pytest.mark.slow) for n in TASKS])
def test_tuning_sees_neither_the_test_set_nor_wrong_labels(name: str) -> None:
    task = TASKS[name]
    x, y, test = task.load()
    (own, labels), (validation, clean) = task.split(1000, tuning=True)
    (again, _), (held_out, _) = task.split(1000, tuning=False)
    assert len(own) == len(labels) == task.train
    assert torch.equal(own, again)
    assert torch.equal(held_out, x[-test:])
    place = {tuple(row.flatten().tolist()): i for i, row in enumerate(x)}
    seen = [place[tuple(row.flatten().tolist())] for row in validation]
    assert max(seen) < len(x) - test or name == "text"  # pieces of text may repeat
    assert torch.equal(clean, y[seen]) or name == "text"


def test_the_grid_is_tried_whole_and_its_best_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    scores = {
        (0.02, 0.02): 0.1,
        (0.02, 0.05): 0.7,
        (0.02, 0.15): 0.2,
        (0.1, 0.02): 0.7,
        (0.1, 0.05): 0.3,
        (0.1, 0.15): 0,
    }

    def scored(task: Any, contender: Any, trial: Trial, seed: int, steps: int, tuning: bool) -> Any:
        assert tuning
        return type("Outcome", (), {"accuracy": scores[trial.lr, trial.value] + seed})

    monkeypatch.setattr("bench.accuracy.training.run", scored)
    rows = tune(TASKS["cancer"], contenders()["SAM"], [0, 1], steps=1)
    assert len(rows) == 6
    assert rows[0] == {"lr": 0.02, "value": 0.05, "validation": pytest.approx(1.2)}


@pytest.mark.slow
def test_a_radius_of_nothing_trains_as_sgd_does() -> None:
    task, entrants = TASKS["cancer"], contenders()
    plain = run(task, entrants["SGD"], Trial(0.1, 5e-4), seed=3, steps=12, sharp=True)
    for name in ("SAM", "MSAM"):  # two passes, and one
        same = run(task, entrants[name], Trial(0.1, 0.0), seed=3, steps=12, sharp=True)
        assert same.accuracy == plain.accuracy
        assert same.sharpness == pytest.approx(plain.sharpness, rel=1e-3)
    assert plain.accuracy > 0.85
    assert plain.sharpness is not None and plain.sharpness > 0


@pytest.mark.slow
def test_it_goes_on_where_it_was_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "accuracy.json"
    command = ["--quick", "--tasks", "cancer", "--variants", "SAM", "--seeds", "2", "--out", str(out)]
    assert program.main(command) == 0
    whole = json.loads(out.read_text())
    assert list(whole["tasks"]["cancer"]["variants"]) == ["SGD", "SAM"]
    assert "| `SAM` |" in report.table(whole)
    short = json.loads(out.read_text())
    del short["tasks"]["cancer"]["variants"]["SAM"]
    with pytest.raises(ValueError, match="lacks SAM"):
        report.table(short)
    out.write_text(json.dumps(short))
    trained: list[str] = []
    entry = program._entry
    monkeypatch.setattr(program, "_entry", lambda *given: trained.append(given[1].second) or entry(*given))
    assert program.main(command) == 0
    assert trained == ["rho"]
    assert json.loads(out.read_text())["tasks"] == whole["tasks"]  # the same numbers again
    with pytest.raises(SystemExit):
        program.main([*command, "--seeds", "3"])


def test_the_page_says_first_what_did_not_help() -> None:
    text = report.table(_record())
    assert (
        text.index("- No difference shown: `GSAM`.")
        < text.index("- Worse than SGD: `MSAM`.")
        < text.index("- Better than SGD: `SAM`.")
    )
    assert "Wrong labels, 2 tasks, trained in SGD's time, on average:" in text
    assert "- 6 single comparisons: 2 without a difference, 2 worse, 2 better." in text
    assert f"| `SAM` | {' | '.join(['**+10.3 ± 0.3**'] * 4)} | **+10.3 ± 0.2** |" in text
    assert "| `GSAM` | +0.3 ± 1.2 |" in text
    row = next(line for line in text.splitlines() if line.startswith("| `MSAM` | as accurate as SAM"))
    assert row.count("**-20.7 ± 0.7** |") == 2 and row.count("**-20.7 ± 0.5** |") == 2
    assert "| `SAM` | lr 0.1, rho 0.05 | 70.3 (10.5) | 0.250 | 2.00 | 5 | 70.3 (10.5) |" in text
