"""The tables, report.html and summary.json of a comparison, from histories whose numbers are known."""

import base64
import io
import json
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from matplotlib.figure import Figure
from pytest import MonkeyPatch
from rich.console import Console
from torch.nn.functional import cross_entropy

from fastsam.lab.plots import curves, sweeps
from fastsam.lab.plots import figure as figures
from fastsam.lab.plots.sweeps import Point
from fastsam.lab.report import files, tables
from fastsam.lab.report.finished import FinishedRun, title_of
from fastsam.lab.report.surface import loss_surface
from fastsam.lab.report.table import Table


def make_run(
    label: str,
    seed: int,
    accuracy: list[float | None],
    target_round: int | None = None,
    target: float | None = 0.5,
    point: dict | None = None,
    **options: object,
) -> FinishedRun:
    history = [{"round": i + 1, "train_loss": 1.0 / (i + 1), "test_accuracy": a} for i, a in enumerate(accuracy)]
    values = [a for a in accuracy if a is not None]
    summary = {
        "algorithm": label, "accuracy_final": values[-1], "accuracy_best": max(values),
        "client_accuracy_mean": 0.6, "client_accuracy_std": 0.1 + 0.1 * seed,
        "validation": "prior", "target": target, "rounds_to_target": target_round, "seconds_per_round": 0.25,
        "megabytes": 12.0, "seed": seed,
        **options,
    }  # fmt: skip
    run_dir, algorithm = Path("cmp") / f"{label}-seed{seed}", label.split(" ")[0]
    return FinishedRun(label, seed, summary, history, run_dir, algorithm, point or {}, 0.1)


def test_table_of_single_runs() -> None:
    short = tables.short_table([make_run("a", 0, [0.25, 0.75, 0.5], 2), make_run("b", 0, [0.125, 0.25], None)])
    header, rows = short.head, short.rows
    heads = [
        "algorithm", "test final %", "test best %", "clients % (prior)", "rounds to 50 %", "s per round", "MB sent",
    ]  # fmt: skip
    assert [head.replace("\n", " ") for head in header] == heads
    assert rows[0] == ["a", "50.00", "75.00", "60.00 ± 10.00", "2", "0.250", "12.0"]
    assert rows[1] == ["b", "25.00", "25.00", "60.00 ± 10.00", "–", "0.250", "12.0"]


@pytest.mark.parametrize("width", [60, 80, 120])
def test_a_printed_table_cuts_no_number(width: int) -> None:
    names = ["fedavg", "fedlesam-d", "centralised-sam"]
    runs = [make_run(name, seed, [0.123 + seed, 0.456 + seed], 1) for name in names for seed in range(2)]
    lines = tables.short_table(runs, "three", width).text(width).splitlines()
    assert max(map(len, lines)) <= width
    rows = ["".join(line.split()) for line in lines]
    final = tables.short_table(runs).rows[0][1].replace(" ", "")
    assert sum(final in row for row in rows) == 3


@pytest.mark.parametrize("width", [60, 80])
def test_a_printed_table_breaks_no_word_and_has_the_best_label_in_bold(width: int) -> None:
    names = ["fedavg", "centralised-sam, lr = 0.1", "fedlesam-d"]
    runs = [make_run(name, 0, [0.5, 0.6 + (i == 1) / 10], 1) for i, name in enumerate(names)]
    title = "three algorithms on the handwritten digits of scikit-learn, 50 clients with unequal classes"
    out = io.StringIO()
    console = Console(file=out, width=width, force_terminal=True, highlight=False, markup=False)
    tables.short_table(runs, title, width).show(console)
    printed = out.getvalue().replace("\x1b[1m", "<").replace("\x1b[0m", ">")
    words = printed.replace("<", "").replace(">", "").split()
    assert {*title.split(), "Centralised-SAM,", "FedLESAM-D", "FedAvg"} <= {*words}
    bold = "".join(part.partition(">")[0] for part in printed.split("<")[1:])
    assert "Centralised-SAM" in bold and "70.00" in bold and "FedAvg" not in bold and "FedLESAM" not in bold
    assert max(map(len, printed.replace("<", "").replace(">", "").splitlines())) <= width


def test_one_label_and_a_file_have_no_bold_row() -> None:
    assert tables.short_table([make_run("a", seed, [0.5], 1) for seed in range(2)]).best_row is None
    out = io.StringIO()
    tables.short_table([make_run("a", 0, [0.5]), make_run("b", 0, [0.6])]).show(Console(file=out, width=120))
    assert "b" in out.getvalue() and "\x1b" not in out.getvalue()


def test_table_over_seeds_is_mean_and_the_deviation_of_a_sample() -> None:
    numbers = (("a", 0, 0.5, 1), ("a", 1, 0.7, 4), ("b", 0, 0.5, 1), ("b", 1, 0.3, None))
    runs = [make_run(name, seed, [accuracy], rounds) for name, seed, accuracy, rounds in numbers]
    rows = tables.short_table(runs).rows
    assert rows[0] == ["a", "60.00 ± 14.14", "60.00 ± 14.14", "60.00 ± 15.00", "2.5", "0.250", "12.0"]
    assert rows[1][4] == "1 / –"


def test_one_sentence_per_algorithm_says_what_came_out() -> None:
    base = [make_run("fedavg", seed, [0.25, 0.5], 2, 0.5) for seed in (0, 1)]
    sam = [make_run("fedsam", 0, [0.5, 0.75], 1, 0.5), make_run("fedsam", 1, [0.25, 0.25], None, 0.5)]
    assert tables.sentences([base[0], sam[0]])[1] == (
        "FedSAM: 75.00 % test accuracy, +25.00 points against FedAvg, 50 % after 1.0 rounds."
    )
    assert tables.sentences([*base, *sam, make_run("fedprox", 5, [0.125], None, 0.5)]) == [
        "FedAvg: 50.00 ± 0.00 % test accuracy, 50 % after 2.0 rounds.",
        "FedSAM: 50.00 ± 35.36 % test accuracy, +0.00 points against FedAvg (higher in 1 of 2 seeds), 50 % after"
        " 1.0 rounds (in 1 of 2 seeds).",
        "FedProx: 12.50 % test accuracy, 50 % not reached.",
    ]
    assert tables.sentences([make_run("a", 0, [0.25], target=None)]) == ["a: 25.00 % test accuracy."]


def test_rounds_to_the_target_are_a_mean_and_no_median() -> None:
    runs = [make_run("a", seed, [0.5], target_round) for seed, target_round in enumerate((1, 2, 9))]
    assert tables.short_table(runs).rows[0][4] == "4.0"
    assert tables.to_target(runs).rows[0][1] == "4.0"  # type: ignore[union-attr]


def test_small_sizes_keep_two_digits() -> None:
    traffic = {
        "megabytes": 0.02834, "state_megabytes": 0.0, "client_megabytes": 0.00251, "seconds_training": 0.1,
        "backprops": 1,
    }  # fmt: skip
    runs = [make_run("a", 0, [0.5], 1, **traffic, megabytes_to_target=0.0141, seconds_to_target=1.0)]
    assert tables.short_table(runs).rows[0][-1] == "0.028"
    assert tables.to_target(runs).rows[0][5] == "0.014"  # type: ignore[union-attr]
    assert tables.cost(runs).rows[0][-3:] == ["0.028", "0.00", "0.0025"]
    assert [tables.size(v) for v in (0.0, 0.5, 1.0, 12.04, 31000.0)] == ["0.0", "0.5", "1.0", "12.0", "31000.0"]


def test_no_target_no_column_and_missing_numbers_are_dashes() -> None:
    run = make_run("a", 0, [0.5], target=None)
    run.summary["client_accuracy_std"] = None
    run.summary["client_accuracy_mean"] = None
    short = tables.short_table([run])
    assert "rounds" not in " ".join(short.head) and short.rows[0][3] == "–"


def test_a_folded_table_names_the_worst_and_the_best_client_of_each_seed() -> None:
    metrics = {"accuracy_last10": 0.5, "client_accuracy_min": 0.25, "client_accuracy_max": 1.0, "client_best": 3}
    runs = [make_run("a", i, [0.5], client_worst=7 + i, **metrics) for i in (0, 1)]
    runs = [*runs, make_run("b", 0, [0.25])]
    table, extremes = tables.accuracy(runs), tables.extreme_clients(runs)
    same = "50.00 ± 0.00"
    assert table.rows[0] == ["a", same, same, same, "60.00 ± 15.00"]
    assert table.rows[1][3:] == ["–", "60.00 ± 10.00"] and "'prior'" in table.note and not table.is_folded
    assert extremes is not None and extremes.is_folded
    assert extremes.rows == [["a", "25.00 (client 7, 8)", "100.00 (client 3, 3)"], ["b", "–", "–"]]
    assert tables.extreme_clients(runs[2:]) is None


def test_what_the_target_took_is_relative_to_fedavg_wherever_it_stands() -> None:
    costs = {"seconds_to_target": 3.0, "megabytes_to_target": 8.0}
    runs = [
        make_run("mine", 0, [0.5], 3, **costs), make_run("mine", 1, [0.5], 6, **costs),
        make_run("fedavg", 0, [0.5], 10, seconds_to_target=2.0, megabytes_to_target=4.0),
        make_run("late", 0, [0.5], 5, **costs), make_run("late", 1, [0.4], None),
    ]  # fmt: skip
    table = tables.to_target(runs)
    assert table is not None and list(table.head) == ["algorithm", "rounds", "× FedAvg", "computing s", "× FedAvg",
        "MB sent", "× FedAvg"]  # fmt: skip
    assert table.rows[0] == ["mine", "4.5", "0.45", "3.00", "1.50", "8.0", "2.00"]
    assert table.rows[1][:3] == ["FedAvg", "10", "1.00"]
    assert table.rows[2] == ["late", "5 / –", "–", "–", "–", "–", "–"]  # one seed of two did not get there
    assert tables.to_target([make_run("a", 0, [0.5], target=None)]) is None


def sweep(names: tuple[str, ...] = ("fedavg", "fedsam"), rhos: tuple[float | None, ...] = (None,)) -> list[FinishedRun]:
    """Return runs over two values of alpha; with alpha = 1 a run takes a quarter of the rounds."""
    runs = []
    for alpha, fast in ((0.1, 1), (1.0, 4)):
        for rho in rhos:
            for i, name in enumerate(names):
                point = {"alpha": alpha} | ({"rho": rho} if rho is not None and name == "fedsam" else {})
                label = " ".join([name, *(f"{k}={v:g}" for k, v in point.items())])
                if label not in [run.label for run in runs]:
                    costs = {"seconds_to_target": 8.0 / fast, "megabytes_to_target": 8.0 / fast}
                    runs.append(make_run(label, 0, [0.5, 0.6], (8 + 4 * i) // fast, point=point, **costs))
    return runs


def test_what_the_target_took_is_relative_to_the_run_with_the_same_swept_values() -> None:
    """It was relative to FedAvg with the first alpha."""
    table = tables.to_target(sweep(rhos=(0.1, 0.2)))
    assert table is not None and table.head[2] == "× FedAvg" and "same swept values" in table.note
    assert [(row[0], row[2]) for row in table.rows] == [
        ("FedAvg alpha=0.1", "1.00"), ("FedSAM alpha=0.1 rho=0.1", "1.50"), ("FedSAM alpha=0.1 rho=0.2", "1.50"),
        ("FedAvg alpha=1", "1.00"), ("FedSAM alpha=1 rho=0.1", "1.50"), ("FedSAM alpha=1 rho=0.2", "1.50"),
    ]  # fmt: skip
    partial_table = tables.to_target([run for run in sweep() if run.label != "fedavg alpha=1"])
    assert partial_table is not None and [row[2] for row in partial_table.rows] == ["1.00", "1.50", "–"]
    fedsam_table = tables.to_target(sweep(("fedsam",)))
    assert fedsam_table.head[2] == "× FedSAM alpha=0.1" and [row[2] for row in fedsam_table.rows] == ["1.00", "0.25"]


def test_every_swept_value_has_a_line(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    drawn: dict = {}
    monkeypatch.setattr(curves, "curve", lambda lines, path, *rest: drawn.setdefault(path.name, lines) and path)
    files.draw_curves(sweep(rhos=(0.1, 0.2)), tmp_path, "t")
    lines = [f"{name} alpha={alpha}" for alpha in ("0.1", "1") for name in ("FedAvg", "FedSAM")]
    lines[3:] = ["FedSAM alpha=1 rho=0.1", "FedSAM alpha=1 rho=0.2"]
    lines[1:2] = ["FedSAM alpha=0.1 rho=0.1", "FedSAM alpha=0.1 rho=0.2"]
    assert {name: [*lines] for name, lines in drawn.items()} == {"curves.png": lines}
    summary = files.summary([replace(run, run_dir=tmp_path / run.run_dir) for run in sweep()], tmp_path)
    assert [run["swept"] for run in summary["runs"]] == [{"alpha": 0.1}, {"alpha": 0.1}, {"alpha": 1.0}, {"alpha": 1.0}]


def test_every_figure_says_what_it_is_of(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    """A scaled figure is not the paper's, wherever its file goes."""
    headings: dict[str, str] = {}

    def save(figure: Figure, path: Path) -> Path:
        headings[path.name] = figure.get_suptitle().replace("\n", " ")
        return path

    monkeypatch.setattr(figures, "save", save)
    runs = sweep(rhos=(0.1, 0.2))
    runs = [replace(run, history=[{**record, "sharpness": 1.0} for record in run.history]) for run in runs]
    title = "CIFAR-10, Dirichlet 0.6, 100 clients (scaled to digits)"
    files.draw_curves(runs, tmp_path, title)
    files.draw_sweeps(runs, tmp_path, title)
    names = {"curves", "curve-sharpness", "sweep-alpha", "sweep-rho"}
    assert headings.keys() == {f"{name}.png" for name in names} and all(title in text for text in headings.values())


def test_a_title_names_a_few_algorithms_and_counts_many() -> None:
    runs = [make_run(name, 0, [0.5]) for name in "abcde"]
    assert title_of([*runs, *runs], "digits") == "a, b, c, d, e on digits"
    assert title_of([*runs, make_run("f", 0, [0.5])], "digits") == "6 algorithms on digits"


def test_cost_and_measures_tables() -> None:
    costs = {"seconds_training": 0.125, "backprops": 12000, "state_megabytes": 1.5, "client_megabytes": 0.75}
    runs = [make_run("a", i, [0.5], **costs, measures={"sharpness": 0.25 + 0.5 * i}) for i in (0, 1)]
    assert tables.cost(runs).rows == [["a", "0.125", "0.250", "12,000", "12.0", "1.50", "0.75"]]
    table = tables.last_measures([*runs, make_run("b", 0, [0.5])])
    assert table is not None and list(table.head) == ["algorithm", "global sharpness, one step"]
    assert table.rows == [["a", "0.5 ± 0.35"], ["b", "–"]]
    assert tables.last_measures([make_run("b", 0, [0.5])]) is None


def test_comparison_files(tmp_path: Path) -> None:
    runs = [make_run("a", 0, [0.25, 0.75]), make_run("a", 1, [0.25, None, 0.5])]
    runs += [make_run("b", 0, [0.1, 0.2]), make_run("b", 1, [0.3, 0.4])]
    runs = [replace(run, run_dir=tmp_path / run.run_dir.name) for run in runs]
    facts = {"clients": 4, "note": "<script>alert(1)</script>"}
    command = "fastsam compare x/config.json"
    files.write_comparison(runs, tmp_path, "a, b on digits", facts, command, {})
    pictures = {f"curves{suffix}" for suffix in (".png", ".svg", ".pdf")}
    assert {*os.listdir(tmp_path)} == {*files.COMPARISON_FILES.values()} | pictures
    names = ("accuracy", "cost", "to-50-test-accuracy")
    assert {*os.listdir(tmp_path / "tables")} == {f"{name}{suffix}" for name in names for suffix in (".csv", ".tex")}
    page = (tmp_path / "report.html").read_text()
    assert page.count("<h2>Result</h2>") == 1 and re.search(r"<li>b: \d+.* % test accuracy", page)
    (runs_section,) = re.findall(r"<details><summary>Runs</summary>(.*?)</details>", page, re.S)
    assert "b-seed1" in runs_section and "Repeat with" not in runs_section
    assert "<summary>Worst" not in page and "<h2>Accuracy</h2>" in page and f"<code>{command}</code>" in page
    assert "<td>a</td><td>62.50 ± 17.68</td>" in page and "<li>clients: 4</li>" in page
    assert "<script" not in page and "&lt;script&gt;" in page
    # The page holds its figures, and nothing is loaded from elsewhere.
    data = base64.b64encode((tmp_path / "curves.png").read_bytes()).decode()
    assert f'src="data:image/png;base64,{data}"' in page
    assert "http" not in page and page.count("src=") == page.count('src="data:') == 1 and "<link" not in page
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["algorithms"]["a"]["accuracy_final"] == {"mean": 0.625, "std": pytest.approx(0.125 * 2**0.5)}
    assert summary["algorithms"]["a"]["seeds"] == [0, 1] and "rounds_to_target" not in summary["algorithms"]["b"]
    assert [run["run_dir"] for run in summary["runs"]] == ["a-seed0", "a-seed1", "b-seed0", "b-seed1"]


def test_a_table_is_written_for_papers_and_spreadsheets() -> None:
    table = Table("t", ["algorithm", "best\n%"], [["a_b, c", "1.0 ± 0.5"], ['{"x"} \\', "–"]])
    assert table.csv() == 'algorithm,best %\n"a_b, c",1.0 ± 0.5\n"{""x""} \\",–\n'
    assert table.tex().splitlines() == [
        r"\begin{tabular}{lr}", r"\hline", r"algorithm & best \% \\", r"\hline", r"a\_b, c & 1.0 $\pm$ 0.5 \\",
        r'\{"x"\} \textbackslash{} & -- \\', r"\hline", r"\end{tabular}",
    ]  # fmt: skip


def test_a_sweep_is_drawn_over_its_key(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    drawn: dict = {}
    monkeypatch.setattr(sweeps, "sweep_curve", lambda lines, key, path, title: drawn.setdefault(key, lines) and path)
    runs = [make_run("fedavg", 0, [0.5])]
    for rho in (0.01, 0.1):
        runs += [make_run(f"fedsam rho={rho:g}", i, [0.5 + rho], point={"rho": rho}) for i in (0, 1)]
    figures = files.draw_sweeps(runs, tmp_path)
    assert [figure.path.name for figure in figures] == ["sweep-rho.png"]
    points = [Point(0.01, [0.51, 0.51]), Point(0.1, [0.6, 0.6])]
    assert drawn == {"rho": {"FedAvg": [Point(None, [0.5])], "FedSAM": points}}


def test_a_loss_surface_is_around_the_weights() -> None:
    data, model = [(torch.randn(9, 4), torch.randint(0, 3, (9,)))], torch.nn.Linear(4, 3)
    grid = loss_surface(model, data, cross_entropy, 3)
    assert grid[1, 1] == pytest.approx(cross_entropy(model(data[0][0]), data[0][1]).item(), rel=1e-5)
    assert grid.shape == (3, 3)
