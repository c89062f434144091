"""`fastsam reproduce` end to end on the digits: reports, resuming, refusals; and the cells computed from runs."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fastsam import fed
from fastsam.lab import cli, experiment
from fastsam.lab.report.finished import FinishedRun
from fastsam.lab.reproduce.numbers import Outcome, cell
from fastsam.lab.reproduce.table import Column, Part, load
from tests.helpers import oracle
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
    assert re.findall("<td>(.*?)</td>", row)[7:13:2] == ["0.31x", "0.60x", "0.30x †"]
    assert "published cell with † contradicts another statement of the paper" in page
    assert "ours (digits, to 80 %)" in page and "ours (digits, to 88 %)" in page
    (changes,) = re.findall("<li>keys with other values than the paper&#x27;s: (.*)</li>", page)
    assert {"data", "rounds", "clients"} <= {*changes.split()} and changes.endswith(" --rounds 2")
    assert "lr" not in changes.split(), "the rate is the paper's"
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
    assert len(cells) == 1 and cells[0]["paper"] == "0.30x †" and cells[0]["text"] == "–"
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
    assert "\nFedSAM,1x,–,1x,–,2x,–\n" in text
    assert re.search(r"\nFedGAMMA,3x,3 \(3x\),2x,[\d.]+ \(2x\),2x,\d+ \(2x\)\n", text)
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


def _run(algorithm: str, seed: int, accuracies: list[float], **summary: Any) -> FinishedRun:
    """Return a run whose rounds cost 2 s and 3 MB each."""
    history = [
        {"round": i, "test_accuracy": a, "seconds_training": 2.0, "megabytes_down": 1.0, "megabytes_up": 2.0}
        for i, a in enumerate(accuracies, 1)
    ]
    facts = {"accuracy_final": accuracies[-1], "hyperparameters": {}, **summary}
    return FinishedRun(algorithm, seed, facts, history, Path(), algorithm)


def _cell(metric: str, *parts: list[FinishedRun], target: float | None = None, seeds: int = 0) -> Any:
    """Return a cell of FedSAM in a column with these runs in its parts."""
    outcomes = {Part(f"part {i}", (), {}, ()): Outcome(runs, {}, np.zeros((1, 1))) for i, runs in enumerate(parts)}
    return cell(metric, Column("", tuple(outcomes), target), "fedsam", outcomes, seeds)


def test_cells() -> None:
    runs = [_run("fedsam", 0, [0.1, 0.5, 0.9]), _run("fedsam", 1, [0.1, 0.5, 0.7])]
    assert _cell("accuracy", runs) == (pytest.approx(80.0), "80.00 ± 14.14")
    assert _cell("rounds", runs, target=0.5) == (2.0, "2")
    assert _cell("rounds", runs, target=0.8, seeds=2) == (3.0, "3 (1 of 2 seeds)")
    assert _cell("rounds", runs, target=0.95, seeds=2) == (None, "–")
    runs += [_run("fedavg", 0, [0.1, 0.1, 0.1, 0.9]), _run("fedavg", 1, [0.1, 0.1, 0.1, 0.9])]
    assert _cell("relative_rounds", runs, target=0.5) == (2.0, "2.0 (0.5x)")
    assert _cell("relative_traffic", runs, target=0.5) == (6.0, "6.00 (0.5x)")
    assert _cell("relative_compute", runs, target=0.5) == (4.0, "4.00 (0.5x)")


def test_a_multiple_is_one_of_means_over_the_same_seeds() -> None:
    runs = [_run("fedsam", seed, [0.9], backprops=60.0 * (seed + 1)) for seed in (0, 1, 2)]
    base = [_run("fedavg", 0, [0.1, 0.9], backprops=10.0), _run("fedavg", 1, [0.1] * 3 + [0.9], backprops=30.0)]
    assert _cell("backprops", runs + base, seeds=3) == (90.0, "90 (4.5x) (2 of 3 seeds)")
    assert _cell("relative_rounds", runs[:2] + base, target=0.5, seeds=2) == (1.0, "1.0 (0.333x)")
    # Only one seed of FedAvg reached the accuracy.
    late_base = [base[0], _run("fedavg", 1, [0.1])]
    assert _cell("relative_rounds", runs[:2] + late_base, target=0.5, seeds=2) == (1.0, "1.0 (0.5x) (1 of 2 seeds)")
    assert _cell("relative_rounds", runs[:2], target=0.5, seeds=2) == (1.0, "1.0")


def test_a_column_averages_its_parts_seed_by_seed() -> None:
    parts = [_run("fedsam", 0, [0.2]), _run("fedsam", 1, [0.4])], [_run("fedsam", 0, [0.6]), _run("fedsam", 1, [0.8])]
    assert _cell("accuracy", *parts) == (pytest.approx(50.0), "50.00 ± 14.14")
    # Seed 0 of the second part is missing: its mean would be of another setting.
    assert _cell("accuracy", parts[0], parts[1][1:], seeds=2) == (pytest.approx(60.0), "60.00 (1 of 2 seeds)")


def test_training_accuracy_is_of_all_samples() -> None:
    assert _cell("train", [_run("fedsam", 0, [0.1], measures={"train_set_accuracy": 0.9507})])[1] == "95.07"


def test_stored_memory_is_counted() -> None:
    """Table 7 of FedLESAM, the doubtful cell aside."""
    expected = {
        "fedsam": "1x", "fedlesam": "2x", "mofedsam": "2x", "fedsmoo": "4x", "fedgamma": "3x", "fedlesam-s": "4x",
    }  # fmt: skip
    table = load("fedlesam-table7")
    (section,) = table.sections
    runs = []
    for name in table.algorithms:
        result = fed.run(oracle.smooth_model(), oracle.ragged_clients(), fed.algorithms.registry[name](), rounds=2)
        runs.append(_run(name, 0, [0.1], client_vectors=result.summary()["client_vectors"]))
    outcomes = {part: Outcome(runs, {}, np.zeros((1, 1))) for part in table.parts}
    for name, text in expected.items():
        assert cell("memory", section.columns[0], name, outcomes, 1)[1] == f"{text[0]} ({text})"
        assert section.published[name][0] == text
