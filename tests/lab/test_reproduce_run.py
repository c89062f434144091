"""`fastsam reproduce` end to end on the digits: reports, resuming, refusals; and the cells computed from runs."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fastsam.fed.data import FederatedData
from fastsam.lab import cli, experiment
from fastsam.lab.report.finished import FinishedRun
from fastsam.lab.reproduce import runner
from fastsam.lab.reproduce.metrics import METRICS, cell
from fastsam.lab.reproduce.table import Column, load
from tests.helpers.small_archives import torchvision

QUICK = ["--scale", "--rounds", "2", "--seeds", "0"]


@pytest.fixture(scope="module")
def table_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run a scaled table with two rounds and return its folder."""
    directory = tmp_path_factory.mktemp("reproduce") / "t5"
    assert cli.main(["reproduce", "fedlesam-table5", *QUICK, "--run-dir", str(directory)]) == 0
    return directory


def test_the_report_has_the_papers_cells_beside_ours(table_dir: Path) -> None:
    page = (table_dir / "report.html").read_text()
    assert "<h1>fedlesam-table5: " in page and "(scaled to digits: not the paper&#x27;s setting)" in page
    row = next(line for line in page.splitlines() if "<td>FedLESAM-D</td>" in line and "0.31x" in line)
    assert re.findall("<td>(.*?)</td>", row)[7:13:2] == ["0.31x", "0.60x", "0.30x †1"]
    assert "†1: 0.30x the time for 0.31x the rounds contradicts" in page
    assert "ours (digits, to 80 %)" in page and "ours (digits, to 88 %)" in page
    changes = (table_dir / "tables" / "what-this-run-changes-in-the-paper-s-setting.csv").read_text().splitlines()
    assert {"data,cifar10,digits,everywhere", "rounds,800,2,everywhere"} <= {*changes}
    assert "fastsam reproduce fedlesam-table5 --scale digits --seeds 0 --rounds 2" in page
    assert not re.search(r'(src|href)="(?!data:)', page)
    (part,) = load("fedlesam-table5").parts
    assert "data:image/png;base64," in (table_dir / part.slug / "report.html").read_text()


def test_the_summary_has_every_cell(table_dir: Path) -> None:
    summary = json.loads((table_dir / "summary.json").read_text())
    table = load("fedlesam-table5", "digits")
    assert len(summary["cells"]) == 2 * 3 * 7 and (summary["scale"], summary["seeds"]) == ("digits", [0])
    section, column = table.sections[0].title, "74 %"
    fields = {"section": section, "column": column, "algorithm": "fedlesam-d", "metric": "relative_compute"}
    cells = [c for c in summary["cells"] if {k: c[k] for k in fields} == fields]
    assert len(cells) == 1 and cells[0]["paper"] == "0.30x" and len(cells[0]["not_to_be_trusted"]) == 1
    assert {claim["winner"] for claim in summary["claims"]} == {"fedlesam-s", "fedlesam-d"}


def test_resuming_reuses_the_runs_and_extends_them(table_dir: Path, tmp_path: Path) -> None:
    copy = tmp_path / "t5"
    shutil.copytree(table_dir, copy)
    part = next(path for path in copy.iterdir() if path.is_dir())
    old_text = (part / "fedsam-seed0" / "metrics.jsonl").read_text()
    shutil.rmtree(part / "fedavg-seed0")
    command = ["reproduce", "fedlesam-table5", "--scale", "--seeds", "0", "--run-dir", str(copy)]
    assert cli.main([*command, "--rounds", "3"]) == 1, "the directory exists"
    assert cli.main([*command, "--rounds", "3", "--resume"]) == 0
    lines = (part / "fedsam-seed0" / "metrics.jsonl").read_text().splitlines()
    assert lines[:2] == old_text.splitlines() and len(lines) == 3
    assert len((part / "fedavg-seed0" / "metrics.jsonl").read_text().splitlines()) == 3


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["fedlesam-table9", *QUICK], "is not a directory of `fastsam reproduce fedlesam-table9 --scale digits`"),
        (["fedlesam-table5", "--scale", "--seeds", "0", "--rounds", "2", "--lr", "0.3"],
            "cannot be resumed with another lr"),
    ],
)  # fmt: skip
def test_a_directory_of_something_else(table_dir: Path, words: list[str], message: str, capsys: Any) -> None:
    old_config = (table_dir / "config.json").read_bytes()
    assert cli.main(["reproduce", *words, "--run-dir", str(table_dir), "--resume"]) == 1
    assert message in capsys.readouterr().err and (table_dir / "config.json").read_bytes() == old_config


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("fedsam-table1", ["{where}", "EMNIST"]),
        ("fedlesam-table2", ["{where}", "cifar-10-python.tar.gz"]),
        ("fedlesam-table3", ["{where}", "OfficeHome", "officehome/Art/<class>/<image>"]),
    ],
)
def test_a_missing_archive_is_told_first(name: str, words: list[str], tmp_path: Path, capsys: Any) -> None:
    """Without data for the paper's scale, the message names the folder to fill, and no file is left."""
    torchvision()
    data_dir = tmp_path / "archives"
    run_dir = tmp_path / "out"
    assert cli.main(["reproduce", name, "--data-dir", str(data_dir), "--run-dir", str(run_dir)]) == 1
    error = capsys.readouterr().err.lower()
    assert all(word.format(where=data_dir).lower() in error for word in words) and not run_dir.exists()


def test_what_the_command_says_of_wrong_words(capsys: Any) -> None:
    assert cli.main(["reproduce"]) == 1 and "which table? Choose from fedsam-table1" in capsys.readouterr().err
    for extra in (["extra"], ["--rounds", "3"], ["fedsam-fig2", "--rho", "1"], ["--scale"], ["--seeds", "1"]):
        assert cli.main(["reproduce", "--list", *extra]) == 1
        output = capsys.readouterr()
        assert "--list shows all tables and figures and takes nothing else" in output.err and not output.out


@pytest.mark.slow
def test_a_run_that_fails_leaves_its_cells_empty(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    start = experiment.start

    def failing_start(trial: Any, *arguments: Any) -> Any:
        if trial.config.algorithm == "fedsam":
            raise RuntimeError("all clients of round 1 were excluded")
        return start(trial, *arguments)

    monkeypatch.setattr(experiment, "start", failing_start)
    directory = tmp_path / "t"
    assert cli.main(["reproduce", "fedlesam-table7", "--scale", "--run-dir", str(directory)]) == 1
    text = "\n".join(path.read_text() for path in (directory / "tables").glob("*.csv"))
    assert "\nFedSAM,1x,–,1x,–,2x,–\n" in text and "\nFedGAMMA,3x,3x,2x,2x,2x,2x\n" in text
    page = (directory / "report.html").read_text()
    assert "<li>failed: fedsam-seed0: all clients of round 1 were excluded</li>" in page
    assert "error: fedsam-seed0" in capsys.readouterr().err


@pytest.mark.slow
def test_an_interruption_says_how_to_go_on(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    def interrupted_start(*arguments: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(experiment, "start", interrupted_start)
    directory = tmp_path / "t"
    words = ["reproduce", "fedlesam-table7", "--scale", "--rounds", "1", "--run-dir", str(directory)]
    assert cli.main(words) == 130
    command = f"fastsam reproduce fedlesam-table7 --scale digits --seeds 0 --rounds 1 --run-dir {directory} --resume"
    assert command in capsys.readouterr().err
    monkeypatch.undo()
    assert cli.main([*command.split()[1:]]) == 0 and (directory / "report.html").exists()


@pytest.mark.slow
def test_who_holds_which_classes_is_a_table(tmp_path: Path) -> None:
    directory = tmp_path / "classes"
    assert cli.main(["reproduce", "fedlesam-fig5", "--scale", "--run-dir", str(directory)]) == 0
    files = [*(directory / "tables").glob("*-who-holds-which-classes.csv")]
    assert len(files) == 8
    assert all(len(path.read_text().splitlines()) in (21, 41) for path in files)


@pytest.mark.slow
def test_two_names_for_one_axis(tmp_path: Path) -> None:
    """The alpha of FedCM is drawn on the axis of the beta of other methods."""
    from rich.console import Console

    table = load("fedsam-fig3", "digits")
    part = replace(table.parts[-1], sweep=("fedcm.alpha=0.1,0.5", "beta=0.1,0.5"))
    table = replace(table, sections=(replace(table.sections[0], columns=(Column("beta", (part,)),)),))
    plans = runner.plans(table, ["--rounds", "1", "--clients", "4", "--participation", "1"], [0])
    outcome = runner.run(table, plans, tmp_path, False, Console(quiet=True))[part]
    assert len(outcome.runs) == 6 and {tuple(run.point) for run in outcome.runs} == {("beta",)}


def _run(algorithm: str, seed: int, accuracies: list[float], **summary: Any) -> FinishedRun:
    """Return a run whose rounds cost 2 s and 3 MB each."""
    history = [
        {"round": i, "test_accuracy": a, "seconds_training": 2.0, "megabytes_down": 1.0, "megabytes_up": 2.0}
        for i, a in enumerate(accuracies, 1)
    ]
    facts = {"accuracy_final": accuracies[-1], "hyperparameters": {}, **summary}
    return FinishedRun(algorithm, seed, facts, history, Path(), algorithm)


def test_cells() -> None:
    base = [[_run("fedavg", 0, [0.1, 0.5, 0.9]), _run("fedavg", 1, [0.1, 0.5, 0.7])]]
    own_runs = [[_run("fedsam", 0, [0.5, 0.6, 0.8]), _run("fedsam", 1, [0.1, 0.2, 0.3])]]
    assert cell(METRICS["accuracy"], base, base, None) == (pytest.approx(80.0), "80.00 ± 14.14")
    assert cell(METRICS["rounds"], base, base, 0.5) == (2.0, "2")
    assert cell(METRICS["rounds"], base, base, 0.8) == (None, "3 / –")
    assert cell(METRICS["rounds"], base, base, 0.95) == (None, "–")
    assert cell(METRICS["relative_rounds"], [own_runs[0][:1]], [base[0][:1]], 0.5) == (1.0, "1.0 (0.50x)")
    assert cell(METRICS["relative_traffic"], base, base, 0.5) == (6.0, "6.00 (1.00x)")
    assert cell(METRICS["relative_compute"], base, base, 0.5) == (4.0, "4.00 (1.00x)")


def test_a_multiple_is_one_of_means_over_the_same_seeds() -> None:
    own_runs = [[_run("fedsam", seed, [0.9], backprops=60.0) for seed in (0, 1)]]
    base = [[_run("fedavg", 0, [0.1, 0.9], backprops=10.0), _run("fedavg", 1, [0.1, 0.1, 0.1, 0.9], backprops=30.0)]]
    assert cell(METRICS["backprops"], own_runs, base, None) == (60.0, "3x")
    assert cell(METRICS["relative_rounds"], own_runs, base, 0.5) == (1.0, "1.0 (0.33x)")
    # Only one seed of FedAvg reached the accuracy, so there is no comparison.
    late_base = [[base[0][0], _run("fedavg", 1, [0.1])]]
    assert cell(METRICS["relative_rounds"], own_runs, late_base, 0.5) == (1.0, "1.0")


def test_a_column_averages_its_parts_seed_by_seed() -> None:
    parts = [[_run("fedavg", 0, [0.2]), _run("fedavg", 1, [0.4])], [_run("fedavg", 0, [0.6]), _run("fedavg", 1, [0.8])]]
    assert cell(METRICS["accuracy"], parts, parts, None) == (pytest.approx(50.0), "50.00 ± 14.14")
    short_parts = [parts[0], parts[1][1:]]  # seed 0 of the second part is missing: its mean would be of another setting
    assert cell(METRICS["accuracy"], short_parts, short_parts, None) == (pytest.approx(60.0), "60.00")


def test_a_cell_and_a_ratio_say_of_how_many_seeds_they_are() -> None:
    """A ratio is of the seeds that both algorithms have."""
    base = [[_run("fedavg", s, [0.1] * s + [0.9], backprops=10.0 + 10 * s) for s in (0, 1, 2)]]
    own_runs = [[_run("fedsam", s, [0.1] * s + [0.9], backprops=20.0 + 10 * s) for s in (0, 2)]]
    text = "90.00 ± 0.00 (2 of 3 seeds)"
    assert cell(METRICS["accuracy"], own_runs, base, None, 3) == (pytest.approx(90.0), text)
    assert cell(METRICS["backprops"], own_runs, base, None, 3) == (30.0, "1.5x (2 of 3 seeds)")
    assert cell(METRICS["relative_rounds"], own_runs, base, 0.5, 3) == (2.0, "2.0 (1.00x) (2 of 3 seeds)")
    full, short = [own_runs[0] + [_run("fedsam", 1, [0.9], backprops=90.0)]], [base[0][:1]]
    assert cell(METRICS["backprops"], full, short, None, 3) == (50.0, "2x (1 of 3 seeds)")
    text = "1.7 (1.00x) (1 of 3 seeds)"
    assert cell(METRICS["relative_rounds"], full, short, 0.5, 3) == (pytest.approx(5 / 3), text)
    assert cell(METRICS["rounds"], own_runs, base, 0.95, 3) == (None, "–")


def test_clients_training_accuracy_is_a_mean_and_a_spread() -> None:
    summary = {"train_accuracy_mean": 0.9507, "train_accuracy_std": 0.0094}
    runs = [[_run("fedavg", 0, [0.1], **summary)]]
    assert cell(METRICS["train"], runs, runs, None) == (pytest.approx(95.07), "95.07 (0.94)")
    x = torch.eye(3)
    clients = [(x, torch.tensor([0, 1, 2])), (x[:2], torch.tensor([0, 2]))]
    data = FederatedData(clients, (x, torch.tensor([0, 1, 2])), 3, "three")
    model = torch.nn.Linear(3, 3, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.eye(3))
    np.testing.assert_array_equal(runner.client_accuracies(model, data), [1.0, 0.5])


def test_stored_memory_is_counted_from_the_declarations() -> None:
    """Table 7 of FedLESAM, the doubtful cell aside."""
    base = [[_run("fedavg", 0, [0.1])]]
    expected = {
        "fedsam": "1x", "fedlesam": "2x", "mofedsam": "2x", "fedsmoo": "4x", "fedgamma": "3x", "fedlesam-s": "4x",
    }  # fmt: skip
    for name, text in expected.items():
        assert cell(METRICS["memory"], [[_run(name, 0, [0.1])]], base, None)[1] == text
        assert load("fedlesam-table7").sections[0].published[name][0] == text
