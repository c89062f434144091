"""Callbacks: output of the loggers (the libraries themselves: tests/integrations/test_trackers.py), and
progress on a terminal."""

import csv
import io
import json
import re
import sys
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from fastsam import fed
from fastsam.fed.callbacks import CSV, MLflow, TensorBoard, WandB
from fastsam.fed.callbacks.logs import numbers
from fastsam.fed.callbacks.terminal import Countdown, RunProgress, describe, duration
from tests.helpers.fed_rundir import Alarm, records, start


def test_the_numbers_of_a_record():
    record = {"round": 2, "a": 0.5, "none": None, "excluded": [{"client": 3}], "word": "x", "flag": True}
    assert numbers(record) == {"round": 2.0, "a": 0.5, "excluded": 1.0}


def rows(path: Any) -> list[dict[str, str]]:
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def test_csv_has_every_round_of_a_run_and_of_its_continuation(tmp_path):
    path = tmp_path / "deep" / "rounds.csv"
    result = start(tmp_path / "run", rounds=3, eval_every=2, callbacks=[CSV(path)])
    assert len(rows(path)) == 3
    for row, record in zip(rows(path), result.history, strict=True):
        assert list(row) == list(record)
        assert row["test_loss"] == ("" if record["test_loss"] is None else repr(record["test_loss"]))
        assert float(row["train_loss"]) == record["train_loss"] and json.loads(row["excluded"]) == record["excluded"]
    path.write_text("of another run")
    start(tmp_path / "run", rounds=4, eval_every=2, resume=True, callbacks=[CSV(path)])
    assert [row["round"] for row in rows(path)] == ["1", "2", "3", "4"]


def test_csv_of_records_that_get_a_new_key(tmp_path):
    path = tmp_path / "rounds.csv"
    result, view = CSV(path), SimpleNamespace(history=[])
    result.on_start(view)
    for record in ({"round": 1, "a": 1}, {"round": 2, "b": "x,y"}, {"round": 3, "a": 3}):
        view.history.append(record)
        result.on_round(view, record)
    first, second = {"round": "1", "a": "1", "b": ""}, {"round": "2", "a": "", "b": "x,y"}
    assert rows(path) == [first, second, {"round": "3", "a": "3", "b": ""}]


class Library:
    """Stands in for a package: writes down what is called."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            self.calls.append((name, arguments, options))
            return self

        return call

    def named(self, name: str) -> list[tuple[Any, ...]]:
        return [call[1:] for call in self.calls if call[0] == name]


@pytest.mark.parametrize("fails", [False, True])
def test_wandb(fails, tmp_path, monkeypatch):
    library = Library()
    library.summary = SimpleNamespace(update=lambda summary: library.calls.append(("summary", (summary,), {})))
    monkeypatch.setitem(sys.modules, "wandb", library)
    result = log_run(tmp_path, WandB(project="fed"), fails)
    (_, options), *_ = library.named("init")
    assert options["project"] == "fed" and options["config"]["algorithm"] == "MoFedSAM"
    logs = library.named("log")
    assert [options["step"] for _, options in logs] == [1, 2] and logs[0][0][0]["train_loss"] == result[0]["train_loss"]
    assert [summary["rounds"] for (summary,), _ in library.named("summary")] == ([] if fails else [2])
    assert library.named("finish") == [((), {"exit_code": int(fails)})]


@pytest.mark.parametrize("fails", [False, True])
def test_mlflow(fails, tmp_path, monkeypatch):
    library = Library()
    monkeypatch.setitem(sys.modules, "mlflow", library)
    result = log_run(tmp_path, MLflow("mine", run_name="one"), fails)
    assert [name for name, *_ in library.calls[:3]] == ["set_experiment", "start_run", "log_params"]
    assert library.named("start_run") == [((), {"run_name": "one"})]
    parameters = library.named("log_params")[0][0][0]
    assert parameters["lr"] == "0.1" and all(isinstance(v, str) and len(v) <= 500 for v in parameters.values())
    logs = library.named("log_metrics")
    assert [options["step"] for _, options in logs] == [1, 2] and logs[1][0][0]["train_loss"] == result[1]["train_loss"]
    assert library.named("end_run") == [(("FAILED" if fails else "FINISHED",), {})]


@pytest.mark.parametrize("fails", [False, True])
def test_tensorboard(fails, tmp_path, monkeypatch):
    library = Library()
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", library)
    result = log_run(tmp_path, TensorBoard(tmp_path / "events"), fails)
    assert library.named("SummaryWriter") == [((tmp_path / "events",), {"purge_step": None})]
    scalars = {arguments for arguments, _ in library.named("add_scalar")}
    assert ("train_loss", result[1]["train_loss"], 2) in scalars and library.calls[-1][0] == "close"


def log_run(tmp_path: Any, callback: fed.Callback, fails: bool) -> list[dict[str, Any]]:
    """Return the records of a run of two rounds; with `fails` it is then interrupted."""
    end = [Alarm(2, KeyboardInterrupt())] if fails else []
    with pytest.raises(KeyboardInterrupt) if fails else nullcontext():
        start(tmp_path / "run", rounds=2 + fails, callbacks=[callback, *end])
    return records(tmp_path / "run")


@pytest.mark.parametrize(
    ("make", "module", "package"),
    [
        (lambda: TensorBoard("events"), "torch.utils.tensorboard", "tensorboard"),
        (WandB, "wandb", "wandb"),
        (MLflow, "mlflow", "mlflow"),
    ],
)
def test_a_package_that_is_not_there_is_told_when_the_callback_is_made(make, module, package, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=f"this callback needs the package {package}: pip install {package}"):
        make()


# --- Progress of a run, on a terminal and without one.


def test_progress_without_a_terminal_is_a_few_plain_lines(capsys: pytest.CaptureFixture) -> None:
    with RunProgress(Console(force_terminal=False, width=60), "fedsam", 40) as progress:
        for i in range(1, 41):
            progress(
                {
                    "round": i, "train_loss": 0.5, "test_accuracy": 0.25, "client_accuracy_mean": 0.3,
                    "client_accuracy_std": 0.1,
                }
            )  # fmt: skip
    lines = capsys.readouterr().out.splitlines()
    assert [int(line.split("round ")[1].split("/")[0]) for line in lines] == [1, 4, 8, 12, 16, 20, 24, 28, 32, 36, 40]
    assert lines[0] == "fedsam: round 1/40  loss 0.5000  test 25.00 %  clients 30.00 ± 10.00 %"


def test_progress_of_one_run_among_many_is_its_last_line(capsys: pytest.CaptureFixture) -> None:
    with RunProgress(Console(force_terminal=False, width=60), "fedsam", 40, every=40) as progress:
        for i in range(1, 41):
            progress({"round": i, "train_loss": 0.5, "test_accuracy": None})
    assert capsys.readouterr().out.splitlines() == ["fedsam: round 40/40  loss 0.5000"]


def test_a_line_of_80_columns_is_not_cut() -> None:
    out = io.StringIO()
    record = {"round": 1, "train_loss": 0.0384, "test_accuracy": 0.9361, "client_accuracy_mean": None}
    with RunProgress(Console(file=out, force_terminal=True, width=80), "3/10, 31 s left fedsmoo-seed2", 60) as progress:
        for number in (1, 60):
            progress({**record, "round": number})
    lines = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", out.getvalue())
    assert "60/60" in lines and re.search(r"test 93.61 % \d\d:\d\d", lines) and "…" not in lines


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


def test_a_countdown_of_runs() -> None:
    """Four runs: the first was done before, the second takes a minute, the third twenty minutes."""
    clock = iter([0.0, 1.0, 61.0, 61.0, 1261.0, 1261.0])
    countdown = Countdown(4, lambda: next(clock))
    assert countdown.next() == "1/4 " and countdown.next() == "2/4 "
    countdown.add_trained()
    assert countdown.next() == "3/4, 2.0 min left "
    countdown.add_trained()
    assert countdown.next() == "4/4, 10 min left "
    assert Countdown(1).next() == ""
    assert [duration(s) for s in (4, 89, 90, 600, 5399, 5400, 40000)] == [
        "4 s", "89 s", "1.5 min", "10 min", "90 min", "1.5 h", "11 h",
    ]  # fmt: skip
