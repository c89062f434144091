"""What the loggers write. The libraries themselves: tests/integrations/test_trackers.py."""

from __future__ import annotations

import csv
import json
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from fastsam import fed
from fastsam.fed.callbacks import CSV, MLflow, TensorBoard, WandB
from fastsam.fed.callbacks.logs import numbers
from tests.helpers.fed_rundir import start


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
    made, view = CSV(path), SimpleNamespace(history=[])
    made.on_start(view)
    for record in ({"round": 1, "a": 1}, {"round": 2, "b": "x,y"}, {"round": 3, "a": 3}):
        view.history.append(record)
        made.on_round(view, record)
    assert rows(path) == [
        {"round": "1", "a": "1", "b": ""},
        {"round": "2", "a": "", "b": "x,y"},
        {"round": "3", "a": "3", "b": ""},
    ]


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
    library.summary = SimpleNamespace(update=lambda found: library.calls.append(("summary", (found,), {})))
    monkeypatch.setitem(sys.modules, "wandb", library)
    result = logged(tmp_path, WandB(project="fed"), fails)
    (_, options), *_ = library.named("init")
    assert options["project"] == "fed" and options["config"]["algorithm"] == "MoFedSAM"
    logs = library.named("log")
    assert [options["step"] for _, options in logs] == [1, 2] and logs[0][0][0]["train_loss"] == result[0]["train_loss"]
    assert [found["rounds"] for (found,), _ in library.named("summary")] == ([] if fails else [2])
    assert library.named("finish") == [((), {"exit_code": int(fails)})]


@pytest.mark.parametrize("fails", [False, True])
def test_mlflow(fails, tmp_path, monkeypatch):
    library = Library()
    monkeypatch.setitem(sys.modules, "mlflow", library)
    result = logged(tmp_path, MLflow("mine", run_name="one"), fails)
    assert [name for name, *_ in library.calls[:3]] == ["set_experiment", "start_run", "log_params"]
    assert library.named("start_run") == [((), {"run_name": "one"})]
    parameters = library.named("log_params")[0][0][0]
    assert parameters["lr"] == "0.1" and all(
        isinstance(value, str) and len(value) <= 500 for value in parameters.values()
    )
    logs = library.named("log_metrics")
    assert [options["step"] for _, options in logs] == [1, 2] and logs[1][0][0]["train_loss"] == result[1]["train_loss"]
    assert library.named("end_run") == [(("FAILED" if fails else "FINISHED",), {})]


@pytest.mark.parametrize("fails", [False, True])
def test_tensorboard(fails, tmp_path, monkeypatch):
    library = Library()
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", library)
    result = logged(tmp_path, TensorBoard(tmp_path / "events"), fails)
    assert library.named("SummaryWriter") == [((tmp_path / "events",), {"purge_step": None})]
    scalars = {arguments for arguments, _ in library.named("add_scalar")}
    assert ("train_loss", result[1]["train_loss"], 2) in scalars and library.calls[-1][0] == "close"


def logged(tmp_path: Any, callback: fed.Callback, fails: bool) -> list[dict[str, Any]]:
    """The records of a run of two rounds; with `fails` it is then interrupted."""
    seen: list[dict[str, Any]] = []

    class Watches(fed.Callback):
        def on_round(self, run: Any, record: Any) -> None:
            seen.append(record)
            if fails and record["round"] == 2:
                raise KeyboardInterrupt

    options = {"rounds": 3 if fails else 2, "callbacks": [callback, Watches()]}
    if fails:
        with pytest.raises(KeyboardInterrupt):
            start(tmp_path / "run", **options)
    else:
        start(tmp_path / "run", **options)
    return seen


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
