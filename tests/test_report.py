"""The table, report.md, summary.json and the plots of a comparison, from histories whose numbers are known."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from fastsam.fed import plots, report
from fastsam.fed.progress import RunProgress, describe


def finished(
    label: str, seed: int, accuracy: list[float | None], reached: int | None = None, target: float | None = 0.5
) -> report.Finished:
    history = [{"round": i + 1, "train_loss": 1.0 / (i + 1), "test_accuracy": a} for i, a in enumerate(accuracy)]
    known = [a for a in accuracy if a is not None]
    summary = {
        "algorithm": label, "accuracy_final": known[-1], "accuracy_best": max(known),
        "client_accuracy_mean": 0.6, "client_accuracy_std": 0.1 + 0.1 * seed,
        "validation": "prior", "target": target, "rounds_to_target": reached, "seconds_per_round": 0.25, "megabytes": 12.0, "seed": seed,
    }  # fmt: skip
    return report.Finished(label, seed, summary, history, Path("cmp") / f"{label}-seed{seed}")


def test_table_of_single_runs() -> None:
    header, rows = report.table([finished("a", 0, [0.25, 0.75, 0.5], 2), finished("b", 0, [0.125, 0.25], None)])
    heads = [
        "algorithm",
        "test final %",
        "test best %",
        "clients % (prior)",
        "rounds to 50 %",
        "s per round",
        "MB sent",
    ]
    assert [head.replace("\n", " ") for head in header] == heads
    assert rows[0] == ["a", "50.00", "75.00", "60.00 ± 10.00", "2", "0.250", "12.0"]
    assert rows[1] == ["b", "25.00", "25.00", "60.00 ± 10.00", "–", "0.250", "12.0"]


def test_table_over_seeds_is_mean_and_population_deviation() -> None:
    runs = [
        finished("a", 0, [0.5], 1),
        finished("a", 1, [0.7], 4),
        finished("b", 0, [0.5], 1),
        finished("b", 1, [0.3], None),
    ]
    _, rows = report.table(runs)
    assert rows[0] == ["a", "60.00 ± 10.00", "60.00 ± 10.00", "60.00 ± 15.00", "2.5", "0.250", "12.0"]
    assert rows[1][4] == "1 / –"


def test_no_target_no_column_and_missing_numbers_are_dashes() -> None:
    run = finished("a", 0, [0.5], target=None)
    run.summary["client_accuracy_std"] = None
    run.summary["client_accuracy_mean"] = None
    header, rows = report.table([run])
    assert "rounds" not in " ".join(header) and rows[0][3] == "–"


def test_comparison_files(tmp_path: Path) -> None:
    runs = [
        finished("a", 0, [0.25, 0.75]),
        finished("a", 1, [0.25, None, 0.5]),
        finished("b", 0, [0.1, 0.2]),
        finished("b", 1, [0.3, 0.4]),
    ]
    runs = [report.Finished(r.label, r.seed, r.summary, r.history, tmp_path / r.run_dir.name) for r in runs]
    report.write_comparison(
        runs, np.eye(4, 3, dtype=int), tmp_path, "a, b on digits", {"clients": 4}, "fastsam compare x/config.json"
    )
    assert sorted(os.listdir(tmp_path)) == sorted(report.COMPARISON_FILES.values())
    text = (tmp_path / "report.md").read_text()
    assert (
        "| algorithm | test final % |" in text
        and "| a | 62.50 ± 12.50 |" in text
        and "- clients: 4" in text
        and "fastsam compare x/config.json" in text
    )
    assert "`b-seed1`" in text and "](curves.png)" in text and "](classes.png)" in text
    stored = json.loads((tmp_path / "summary.json").read_text())
    assert stored["algorithms"]["a"]["accuracy_final"] == {"mean": 0.625, "std": 0.125}
    assert stored["algorithms"]["a"]["seeds"] == [0, 1] and "rounds_to_target" not in stored["algorithms"]["b"]
    assert [run["run_dir"] for run in stored["runs"]] == ["a-seed0", "a-seed1", "b-seed0", "b-seed1"]


def drawn(monkeypatch: pytest.MonkeyPatch) -> dict:
    """Where the next figure that is saved can be looked at, as "figure"."""
    seen: dict = {}
    real = plots._save
    monkeypatch.setattr(plots, "_save", lambda figure, path: seen.setdefault("figure", figure) and real(figure, path))
    return seen


def records(accuracies: list[float | None]) -> list[dict]:
    return [{"round": i + 1, "test_accuracy": a, "train_loss": 2.0 + i} for i, a in enumerate(accuracies)]


def test_curves_draw_the_lines_the_band_and_the_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = drawn(monkeypatch)
    # In "two" a seed has no evaluation in round 2.
    histories = {"one": [records([0.125, 0.25])], "two": [records([0.125, 0.25]), records([0.375, None])]}
    path = plots.curves(histories, tmp_path / "curves.png", target=0.75, title="t")
    accuracy, error = seen["figure"].axes
    assert path.read_bytes().startswith(b"\x89PNG")
    one, two, target = accuracy.lines
    assert one.get_xydata().tolist() == [[1, 12.5], [2, 25]]
    assert two.get_xydata().tolist() == [[1, 25]]
    assert set(target.get_ydata()) == {75.0}
    assert error.lines[0].get_xydata().tolist() == [[1, 87.5], [2, 75]]
    assert set(error.lines[2].get_ydata()) == {25.0} and error.get_yscale() == "log"
    assert len(accuracy.collections) == 1  # the band of "two"
    labels = [text.get_text() for text in accuracy.get_legend().get_texts()]
    assert labels == ["one", "two (2 seeds)", "target 75 %"]
    assert (accuracy.get_xlabel(), accuracy.get_ylabel(), error.get_ylabel()) == (
        "round",
        "test accuracy (%)",
        "test error (%)",
    )


def test_curves_of_a_run_without_accuracy_show_the_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = drawn(monkeypatch)
    plots.curves({"one": [records([None, None])]}, tmp_path / "curves.png", target=0.5)
    for axes in seen["figure"].axes:
        assert [line.get_xydata().tolist() for line in axes.lines] == [[[1, 2], [2, 3]]]
        assert axes.get_ylabel() == "training loss of the active clients"


def test_a_perfect_run_can_be_drawn(tmp_path: Path) -> None:
    assert plots.curves({"one": [records([1.0, 1.0]), records([0.5, 1.0])]}, tmp_path / "curves.png").exists()


def test_classes_is_a_heat_map_of_the_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = drawn(monkeypatch)
    counts = np.arange(12).reshape(4, 3)
    assert plots.classes(counts, tmp_path / "classes.png").stat().st_size > 1000
    axes = seen["figure"].axes[0]
    assert np.array_equal(axes.images[0].get_array(), counts)
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("class", "client")
    assert plots.classes(np.ones((3000, 200), dtype=int), tmp_path / "large.png").exists()


def test_progress_without_a_terminal_is_a_few_plain_lines(capsys: pytest.CaptureFixture) -> None:
    with RunProgress(Console(force_terminal=False, width=60), "fedsam", 40) as progress:
        for i in range(1, 41):
            progress(
                {
                    "round": i,
                    "train_loss": 0.5,
                    "test_accuracy": 0.25,
                    "client_accuracy_mean": 0.3,
                    "client_accuracy_std": 0.1,
                }
            )
    lines = capsys.readouterr().out.splitlines()
    assert [int(line.split("round ")[1].split("/")[0]) for line in lines] == [1, 4, 8, 12, 16, 20, 24, 28, 32, 36, 40]
    assert lines[0] == "fedsam: round 1/40  loss 0.5000  test 25.00 %  clients 30.00 ± 10.00 %"


def test_progress_on_a_terminal_moves_a_bar(capsys: pytest.CaptureFixture) -> None:
    with RunProgress(Console(force_terminal=True, width=110), "fedsam", 4) as progress:
        progress({"round": 4, "train_loss": 0.5, "test_accuracy": None, "client_accuracy_mean": None})
    out = capsys.readouterr().out
    assert "4/4" in out and "loss 0.5000" in out and "test" not in out


def test_describe_leaves_out_what_a_round_does_not_have() -> None:
    assert describe({"round": 1, "train_loss": 1.0, "test_accuracy": None}) == "loss 1.0000"
