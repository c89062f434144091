"""The tables, report.md, report.html, summary.json and the figures of a comparison, from histories whose numbers are known."""

from __future__ import annotations

import base64
import io
import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from rich.console import Console
from torch.nn.functional import cross_entropy

from fastsam.fed import plots, report
from fastsam.fed.progress import RunProgress, describe
from fastsam.fed.report import tables


def finished(
    label: str,
    seed: int,
    accuracy: list[float | None],
    reached: int | None = None,
    target: float | None = 0.5,
    point: dict | None = None,
    **more: object,
) -> report.Finished:
    history = [{"round": i + 1, "train_loss": 1.0 / (i + 1), "test_accuracy": a} for i, a in enumerate(accuracy)]
    known = [a for a in accuracy if a is not None]
    summary = {
        "algorithm": label, "accuracy_final": known[-1], "accuracy_best": max(known),
        "client_accuracy_mean": 0.6, "client_accuracy_std": 0.1 + 0.1 * seed,
        "validation": "prior", "target": target, "rounds_to_target": reached, "seconds_per_round": 0.25, "megabytes": 12.0, "seed": seed,
        **more,
    }  # fmt: skip
    where, algorithm = Path("cmp") / f"{label}-seed{seed}", label.split(" ")[0]
    return report.Finished(label, seed, summary, history, where, algorithm, point or {}, 0.1)


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


@pytest.mark.parametrize("width", [60, 80, 120])
def test_a_printed_table_cuts_no_number(width: int) -> None:
    names = ["fedavg", "fedlesam-d", "centralised-sam"]
    runs = [finished(name, seed, [0.123 + seed, 0.456 + seed], 1) for name in names for seed in range(2)]
    console = Console(width=width, file=io.StringIO())
    console.print(report.rich_table(runs, "three", width))
    lines = console.file.getvalue().splitlines()
    assert "…" not in console.file.getvalue() and max(map(len, lines)) <= width
    rows = ["".join(line.split()) for line in lines]
    final = report.table(runs)[1][0][1].replace(" ", "")
    assert sum(final in row for row in rows) == 3


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


def test_rounds_to_the_target_are_a_mean_and_no_median() -> None:
    runs = [finished("a", seed, [0.5], reached) for seed, reached in enumerate((1, 2, 9))]
    assert report.table(runs)[1][0][4] == "4.0"
    assert tables.to_target(runs).rows[0][1] == "4.0"  # type: ignore[union-attr]


def test_small_sizes_keep_two_digits() -> None:
    sent = {
        "megabytes": 0.02834,
        "state_megabytes": 0.0,
        "client_megabytes": 0.00251,
        "seconds_training": 0.1,
        "backprops": 1,
    }
    runs = [finished("a", 0, [0.5], 1, **sent, megabytes_to_target=0.0141, seconds_to_target=1.0)]
    assert report.table(runs)[1][0][-1] == "0.028" and tables.to_target(runs).rows[0][5] == "0.014"  # type: ignore[union-attr]
    assert tables.cost(runs).rows[0][-3:] == ["0.028", "0.00", "0.0025"]
    assert [tables.size(v) for v in (0.0, 0.5, 1.0, 12.04, 31000.0)] == ["0.0", "0.5", "1.0", "12.0", "31000.0"]


def test_no_target_no_column_and_missing_numbers_are_dashes() -> None:
    run = finished("a", 0, [0.5], target=None)
    run.summary["client_accuracy_std"] = None
    run.summary["client_accuracy_mean"] = None
    header, rows = report.table([run])
    assert "rounds" not in " ".join(header) and rows[0][3] == "–"


def test_accuracy_table_names_the_worst_and_the_best_client_of_each_seed() -> None:
    over = {"accuracy_last10": 0.5, "client_accuracy_min": 0.25, "client_accuracy_max": 1.0, "client_best": 3}
    runs = [finished("a", i, [0.5], client_worst=7 + i, **over) for i in (0, 1)]
    made = tables.accuracy([*runs, finished("b", 0, [0.25])])
    same = "50.00 ± 0.00"
    assert made.rows[0] == ["a", same, same, same, "60.00 ± 15.00", "25.00 (client 7, 8)", "100.00 (client 3, 3)"]
    assert made.rows[1][3:] == ["–", "60.00 ± 10.00", "–", "–"] and "'prior'" in made.note


def test_what_the_target_took_is_relative_to_fedavg_wherever_it_stands() -> None:
    took = {"seconds_to_target": 3.0, "megabytes_to_target": 8.0}
    runs = [
        finished("mine", 0, [0.5], 3, **took), finished("mine", 1, [0.5], 6, **took),
        finished("fedavg", 0, [0.5], 10, seconds_to_target=2.0, megabytes_to_target=4.0),
        finished("late", 0, [0.5], 5, **took), finished("late", 1, [0.4], None),
    ]  # fmt: skip
    made = tables.to_target(runs)
    assert made is not None and list(made.head) == ["algorithm", "rounds", "× fedavg", "computing s", "× fedavg", "MB sent", "× fedavg"]  # fmt: skip
    assert made.rows[0] == ["mine", "4.5", "0.45", "3.00", "1.50", "8.0", "2.00"]
    assert made.rows[1][:3] == ["fedavg", "10", "1.00"]
    assert made.rows[2] == ["late", "5 / –", "–", "–", "–", "–", "–"]  # one seed of two did not get there
    assert tables.to_target([finished("a", 0, [0.5], target=None)]) is None


def test_a_title_names_a_few_algorithms_and_counts_many() -> None:
    runs = [finished(name, 0, [0.5]) for name in "abcde"]
    assert report.title([*runs, *runs], "digits") == "a, b, c, d, e on digits"
    assert report.title([*runs, finished("f", 0, [0.5])], "digits") == "6 algorithms on digits"


def test_cost_and_measures_tables() -> None:
    paid = {"seconds_training": 0.125, "backprops": 12000, "state_megabytes": 1.5, "client_megabytes": 0.75}
    runs = [finished("a", i, [0.5], **paid, measures={"sharpness": 0.25 + 0.5 * i}) for i in (0, 1)]
    assert tables.cost(runs).rows == [["a", "0.125", "0.250", "12,000", "12.0", "1.50", "0.75"]]
    made = tables.measured([*runs, finished("b", 0, [0.5])])
    assert made is not None and list(made.head) == ["algorithm", "global sharpness, one step"]
    assert made.rows == [["a", "0.5 ± 0.25"], ["b", "–"]]
    assert tables.measured([finished("b", 0, [0.5])]) is None


def test_comparison_files(tmp_path: Path) -> None:
    runs = [
        finished("a", 0, [0.25, 0.75]),
        finished("a", 1, [0.25, None, 0.5]),
        finished("b", 0, [0.1, 0.2]),
        finished("b", 1, [0.3, 0.4]),
    ]
    runs = [replace(run, run_dir=tmp_path / run.run_dir.name) for run in runs]
    facts = {"clients": 4, "note": "<script>alert(1)</script>"}
    context = report.Context("a, b on digits", facts, "fastsam compare x/config.json", np.eye(4, 3, dtype=int))
    report.write_comparison(runs, context, tmp_path)
    assert sorted(os.listdir(tmp_path)) == sorted(report.COMPARISON_FILES.values())
    text, page = (tmp_path / "report.md").read_text(), (tmp_path / "report.html").read_text()
    assert (
        "| algorithm | final % |" in text
        and "| a | 62.50 ± 12.50 |" in text
        and "- clients: 4" in text
        and "fastsam compare x/config.json" in text
    )
    assert "`b-seed1`" in text and "<td>62.50 ± 12.50</td>" in page and "<dd>4</dd>" in page and "<script" not in page
    # Both hold their figures: every one of them is the file, and nothing is loaded from elsewhere.
    for name in ("curves", "classes"):
        data = base64.b64encode((tmp_path / f"{name}.png").read_bytes()).decode()
        assert f"[{name}]: data:image/png;base64,{data}\n" in text and f"][{name}]" in text
        assert f'src="data:image/png;base64,{data}"' in page
    assert "http" not in page and page.count("src=") == page.count('src="data:') == 2 and "<link" not in page
    stored = json.loads((tmp_path / "summary.json").read_text())
    assert stored["algorithms"]["a"]["accuracy_final"] == {"mean": 0.625, "std": 0.125}
    assert stored["algorithms"]["a"]["seeds"] == [0, 1] and "rounds_to_target" not in stored["algorithms"]["b"]
    assert [run["run_dir"] for run in stored["runs"]] == ["a-seed0", "a-seed1", "b-seed0", "b-seed1"]


def test_a_sweep_is_drawn_over_its_key_and_over_rho_by_lr(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(
        plots.ablations, "ablation", lambda lines, key, path, title="": seen.append((key, lines)) or path
    )
    monkeypatch.setattr(plots.ablations, "ratio", lambda lines, path, title="": seen.append(("ratio", lines)) or path)
    runs = [finished("fedavg", 0, [0.5])]
    for rho in (0.01, 0.1):
        runs += [
            finished(f"fedsam rho={rho:g}", i, [0.5 + rho], point={"rho": rho}, hyperparameters={"rho": rho})
            for i in (0, 1)
        ]
    figures = report.ablations(runs, tmp_path)
    assert [figure.path.name for figure in figures] == ["ablation-rho.png", "ablation-rho-lr.png"]
    (key, lines), (_, ratios) = seen
    assert key == "rho" and lines["fedavg"] == [plots.Point(None, [0.5])]
    assert lines["fedsam"] == [plots.Point(0.01, [0.51, 0.51]), plots.Point(0.1, [0.6, 0.6])]
    assert ratios == {"fedavg": [], "fedsam": [(pytest.approx(0.1), [0.51, 0.51]), (pytest.approx(1.0), [0.6, 0.6])]}


def drawn(monkeypatch: pytest.MonkeyPatch) -> dict:
    """Where the next figure that is saved can be looked at, as "figure"."""
    seen: dict = {}
    real = plots.figure.save
    monkeypatch.setattr(plots.figure, "save", lambda made, path: seen.setdefault("figure", made) and real(made, path))
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


def test_many_labels_have_a_legend_beside_the_plot_and_differ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = drawn(monkeypatch)
    plots.curves({f"m{i}": [records([0.1, 0.2])] for i in range(13)}, tmp_path / "curves.png")
    figure = seen["figure"]
    assert figure.axes[0].get_legend() is None and len(figure.legends[0].get_texts()) == 13
    assert len({(line.get_color(), line.get_linestyle()) for line in figure.axes[0].lines}) == 13


def test_the_legend_of_small_plots_covers_no_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = drawn(monkeypatch)
    history = [{"round": 1, "e_w": 0.5}, {"round": 2, "e_w": 3.0}]
    plots.measures({name: [history] for name in "abc"}, ["e_w", "e_w"], tmp_path / "measures.png")
    figure = seen["figure"]
    assert not any(axes.get_legend() for axes in figure.axes) and len(figure.legends[0].get_texts()) == 3


def test_measures_are_small_plots_with_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = drawn(monkeypatch)
    history = [{"round": 1, "sharpness": 0.5, "e_w": None}, {"round": 2, "sharpness": 0.25, "e_w": 3.0}]
    plots.measures({"a": [history, history], "b": [[]]}, ["sharpness", "e_w"], tmp_path / "measures.png")
    first, second = seen["figure"].axes
    assert (first.get_title(), second.get_title()) == ("global sharpness, one step", "drift of the weights, E_w")
    assert [line.get_xydata().tolist() for line in first.lines] == [[[1, 0.5], [2, 0.25]]]
    assert [line.get_xydata().tolist() for line in second.lines] == [[[2, 3.0]]]


def test_ablation_puts_numbers_on_their_scale_and_levels_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = drawn(monkeypatch)
    lines = {
        "fedavg": [plots.Point(None, [0.5, 0.7])],
        "fedsam": [plots.Point(0.1, [0.5, 0.75]), plots.Point(0.01, [0.25, 0.25])],
    }
    plots.ablation(lines, "rho", tmp_path / "a.png")
    axes = seen["figure"].axes[0]
    assert axes.get_xscale() == "log" and axes.get_xlabel() == "radius of the perturbation, ρ"
    level, line = axes.lines[0], axes.containers[0].lines[0]
    assert set(level.get_ydata()) == {60.0} and level.get_linestyle() == "--"
    assert line.get_xydata().tolist() == [[0.01, 25.0], [0.1, 62.5]]
    assert [text.get_text() for text in axes.get_xticklabels()] == ["0.01", "0.1"]


def test_ablation_over_what_is_no_number_joins_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = drawn(monkeypatch)
    plots.ablation({"fedsmoo": [plots.Point(True, [0.5]), plots.Point(False, [0.25])]}, "dyn", tmp_path / "a.png")
    axes = seen["figure"].axes[0]
    assert [text.get_text() for text in axes.get_xticklabels()] == ["true", "false"] and axes.get_xscale() == "linear"
    assert axes.lines[0].get_linestyle() == "None" and sorted(axes.lines[0].get_ydata()) == [25.0, 50.0]


def test_ratio_is_logarithmic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = drawn(monkeypatch)
    plots.ratio({"fedsam": [(1.0, [0.5]), (0.1, [0.25])]}, tmp_path / "r.png")
    assert seen["figure"].axes[0].lines[0].get_xydata().tolist() == [[-1.0, 25.0], [0.0, 50.0]]


def test_surfaces_share_their_levels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = drawn(monkeypatch)
    axis = np.linspace(-1, 1, 9)
    bowl = axis[:, None] ** 2 + axis[None] ** 2 + 0.1
    assert plots.surfaces({"sharp": 10 * bowl, "flat": bowl, "level": 0 * bowl + 1}, 1.0, tmp_path / "s.png").exists()
    panels = [axes for axes in seen["figure"].axes if axes.get_title()]
    assert [axes.get_title() for axes in panels] == ["sharp", "flat", "level"]
    ranges = {axes.collections[0].get_clim() for axes in panels}
    assert len(ranges) == 1 and ranges.pop() == pytest.approx((0.1, 21.0))


@pytest.mark.parametrize(("low", "high"), [(2.02, 2.47), (1.8, 3.4), (0.02, 700.0)])
def test_the_losses_beside_a_surface_are_plain_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, low: float, high: float
) -> None:
    seen = drawn(monkeypatch)
    plots.surfaces({"a": np.linspace(low, high, 25).reshape(5, 5)}, 1.0, tmp_path / "s.png")
    axis = next(axes for axes in seen["figure"].axes if axes.get_ylabel() == "training loss").yaxis
    values = [value for value in axis.get_majorticklocs() if low <= value <= high]
    assert len(values) >= 3 and [axis.get_major_formatter()(value) for value in values] == [f"{v:g}" for v in values]
    assert low > 1 or not {0.1, 1.0, 10.0, 100.0} - set(values)


def test_surfaces_of_models_that_overflow_can_be_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = drawn(monkeypatch)
    grid = np.array([[np.inf, 1e30, np.nan], [1.0, 0.5, 2.0], [3.0, 4.0, 1e9]])
    plots.surfaces({"wild": grid, "never": np.full((3, 3), np.nan)}, 1.0, tmp_path / "s.png")
    assert seen["figure"].axes[0].collections[0].get_clim() == pytest.approx((0.5, 5e3))
    assert plots.surfaces({"never": np.full((3, 3), np.nan)}, 1.0, tmp_path / "n.png").exists()


def test_loss_surfaces_are_those_of_the_final_models(tmp_path: Path) -> None:
    data, model = [(torch.randn(9, 4), torch.randint(0, 3, (9,)))], torch.nn.Linear(4, 3)
    safetensors.torch.save_file(model.state_dict(), tmp_path / "model.safetensors")
    run = replace(finished("a", 0, [0.5]), run_dir=tmp_path)
    grids = report.loss_surfaces([run], lambda run: (torch.nn.Linear(4, 3), data, cross_entropy), 3, tmp_path)
    assert grids["a"][1, 1] == pytest.approx(cross_entropy(model(data[0][0]), data[0][1]).item(), rel=1e-5)
    assert np.array_equal(np.load(tmp_path / "surfaces.npz")["a"], grids["a"]) and grids["a"].shape == (3, 3)


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


def test_progress_of_a_run_that_was_done_before_is_full(capsys: pytest.CaptureFixture) -> None:
    with RunProgress(Console(force_terminal=True, width=110), "fedsam", 4):
        pass
    last = capsys.readouterr().out.rpartition("fedsam")[2]
    assert "4/4" in last and "done before" in last


def test_describe_leaves_out_what_a_round_does_not_have() -> None:
    assert describe({"round": 1, "train_loss": 1.0, "test_accuracy": None}) == "loss 1.0000"
