"""Callbacks: output of the loggers (the libraries themselves: tests/integrations/test_trackers.py), early stopping, the
best model, and progress on a terminal."""

import csv
import io
import json
import logging
import re
import sys
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch
from rich.console import Console

from fastsam import fed
from fastsam.fed.callbacks import CSV, EarlyStopping, MLflow, SaveBest, TensorBoard, WandB
from fastsam.fed.callbacks.logs import numbers
from fastsam.fed.callbacks.terminal import Countdown, RunProgress, describe, duration
from tests.helpers import oracle
from tests.helpers.fed_rundir import Alarm, records, start
from tests.helpers.fed_runs import same_bits


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


# --- Early stopping and the best model, compared with a count from the records.


class View:
    """A run with these values of a metric so far."""

    keys = None

    def __init__(self, *values: float | None) -> None:
        self.history = [{"round": i + 1, "score": value} for i, value in enumerate(values)]
        self.round = len(values)

    def has_value(self, metric: str, num_rounds: int) -> bool:
        return True


def stopped_after(values: list[float | None], **options: Any) -> int | None:
    """The round in which it stops a run with these values."""
    stopping = EarlyStopping("score", **options)
    stopping.on_start(View())
    for record in View(*values).history:
        try:
            stopping.on_round(View(), record)
        except fed.Stop:
            return record["round"]
    return None


@pytest.mark.parametrize(
    ("values", "options", "last_round"),
    [
        ([3, 2, 1, 1, 1, 1], {"mode": "min", "patience": 2}, 5),
        ([1, 2, 3, 3, 3, 3], {"mode": "max", "patience": 3}, 6),
        ([1, 2, 3], {"mode": "min", "patience": 2}, 3),
        (
            [3, None, 4, None, 2, 5, None, 5],
            {"mode": "min", "patience": 2},
            8,
        ),  # rounds without evaluation do not count
        ([1.0, 1.05, 1.1, 1.15], {"mode": "max", "patience": 2, "min_delta": 0.2}, 3),
        ([1.0, 1.1, 1.25, 1.3], {"mode": "max", "patience": 2, "min_delta": 0.2}, None),
        ([float("nan"), float("nan"), 1.0], {"mode": "min", "patience": 2}, 2),
        ([2.0, float("nan"), 1.0, float("nan")], {"mode": "min", "patience": 2}, None),
    ],
)
def test_it_stops_when_patience_is_over(values, options, last_round):
    assert stopped_after(values, **options) == last_round


def test_what_it_says():
    stopping = EarlyStopping("score", patience=2, mode="min")
    with pytest.raises(fed.Stop, match="score has not improved on 0.5 of round 1 in 2 evaluations"):
        stopping.on_start(View(0.5, 0.7, 0.6))


def test_a_run_interrupted_and_resumed_stops_in_the_same_round(tmp_path):
    """Counters are resumed, and a stopped run stays stopped."""

    def stopping() -> EarlyStopping:
        return EarlyStopping("train_loss", patience=3, mode="max")  # which falls

    full_run = start(tmp_path / "whole", rounds=30, callbacks=[stopping()])
    with pytest.raises(KeyboardInterrupt):
        start(tmp_path / "run", rounds=30, callbacks=[stopping(), Alarm(2, KeyboardInterrupt())])
    resumed_result = start(tmp_path / "run", rounds=30, callbacks=[stopping()], resume=True)
    repeat = start(tmp_path / "run", rounds=30, callbacks=[stopping()], resume=True)
    assert 3 < len(full_run.history) < 30
    for run in (resumed_result, repeat):
        assert same_bits(run.model, full_run.model) and run.summary()["stopped"] == full_run.summary()["stopped"]


def test_a_forced_last_evaluation_does_not_count_when_the_run_goes_on(tmp_path):
    """A run of four rounds evaluates its last one. An uninterrupted run has no such evaluation."""
    options = {"eval_every": 3, "lr": 1e-3}

    def callbacks(name: str, metric: str = "test_loss") -> list[Any]:
        return [EarlyStopping(metric, 2, "max"), SaveBest(tmp_path / name, metric, "max")]  # the loss falls

    whole_callbacks, part_callbacks = callbacks("whole"), callbacks("part")
    whole = start(tmp_path / "whole run", rounds=20, callbacks=whole_callbacks, **options)
    first = start(tmp_path / "run", rounds=4, callbacks=callbacks("part"), **options)
    assert whole.history[-1]["round"] == 9 and first.history[3]["test_loss"] is not None
    assert whole.history[3]["test_loss"] is None
    resumed = start(tmp_path / "run", rounds=20, resume=True, callbacks=part_callbacks, **options)
    assert len(resumed.history) == 9 and resumed.summary()["stopped"] == whole.summary()["stopped"]
    assert [one.round for one in part_callbacks] == [one.round for one in whole_callbacks] == [3, 3]
    again = start(tmp_path / "again", rounds=4, callbacks=[EarlyStopping(patience=1, mode="max")], **options)
    assert again.summary()["stopped"] is not None, "in a run of four rounds it counts"
    trained = [EarlyStopping("train_loss", 4, "max")]  # a value of every round
    options["participation"] = 1.0  # the loss falls
    start(tmp_path / "trained", rounds=4, callbacks=trained, **options)
    start(tmp_path / "trained", rounds=20, resume=True, callbacks=trained, **options)
    assert trained[0].rounds_since_best == 4 and trained[0].round == 1


def test_the_best_model_is_that_of_its_round(tmp_path):
    class Models(fed.Callback):
        def __init__(self):
            self.results = {}

        def on_round(self, run, record):
            self.results[record["round"]] = run.model()

    models, path = Models(), tmp_path / "deep" / "best.safetensors"
    best = SaveBest(path, "test_loss")
    result = start(tmp_path / "run", rounds=8, lr=2.0, callbacks=[models, best])
    losses = [record["test_loss"] for record in result.history]
    best_round = 1 + losses.index(min(losses))
    assert best_round < 8, "the last round is the best: this shows nothing"
    model = models.results[8]
    model.load_state_dict(safetensors.torch.load_file(path))
    assert same_bits(model, models.results[best_round]) and (best.round, best.value) == (best_round, min(losses))
    with safetensors.safe_open(path, "pt") as file:
        facts = {"round": str(best_round), "metric": "test_loss", "value": str(min(losses))}
        assert facts.items() <= file.metadata().items()
    # A resumed run knows the best of before; without the file it begins anew.
    old_bytes = path.read_bytes()
    best = SaveBest(path, "test_loss")
    start(tmp_path / "run", rounds=9, lr=2.0, resume=True, callbacks=[best])
    assert (best.round, best.value, best.rounds_since_best) == (best_round, min(losses), 9 - best_round)
    worse = min(losses) < start(tmp_path / "run", rounds=9, lr=2.0, resume=True).history[8]["test_loss"]
    assert worse and path.read_bytes() == old_bytes
    path.unlink()
    for rounds in (10, 11):
        best = SaveBest(path, "test_loss")
        start(tmp_path / "run", rounds=rounds, lr=2.0, resume=True, callbacks=[best])
        with safetensors.safe_open(path, "pt") as file:
            assert best.round == int(file.metadata()["round"]) >= 10


OTHER_RUNS: dict[str, dict[str, Any]] = {
    "options": {"lr": 0.05},
    "data": {"clients": oracle.ragged_clients(sizes=(8, 9, 10, 11, 12))},
    "start": {"model": oracle.smooth_model(seed=1)},
    "algorithm": {"algorithm": fed.FedAvg()},
}


@pytest.mark.parametrize("options", OTHER_RUNS.values(), ids=OTHER_RUNS)
def test_the_best_model_of_another_run_is_neither_replaced_nor_kept_for_this_one(options, tmp_path):
    path = tmp_path / "best.safetensors"
    first = SaveBest(path, "test_loss")
    start(tmp_path / "first", callbacks=[first])
    old_bytes = path.read_bytes()
    words = f"best.safetensors has the model of another run.*round {first.round}.*choose another path"
    start(tmp_path / "second", rounds=2, **options)
    for more in ({}, {"resume": True}):  # a new run, and a resumed run
        directory = tmp_path / ("second" if more else "third")
        with pytest.raises(fed.CallbackError, match=words):
            start(directory, callbacks=[SaveBest(path, "test_loss")], **more, **options)
    assert path.read_bytes() == old_bytes


def test_the_best_model_of_the_same_run_begun_anew_is_replaced(tmp_path):
    path = tmp_path / "best.safetensors"
    start(tmp_path / "first", callbacks=[SaveBest(path, "test_loss")])
    best = SaveBest(path, "test_loss")
    start(tmp_path / "second", callbacks=[best])
    assert best.value is not None
    with pytest.raises(fed.CallbackError, match="best.safetensors has the model with the best test_loss"):
        start(tmp_path / "third", callbacks=[SaveBest(path, "train_loss")])
    path.write_text("of another program")
    with pytest.raises(fed.CallbackError, match="best.safetensors is not a file of SaveBest"):
        start(tmp_path / "fourth", callbacks=[SaveBest(path, "test_loss")])


def test_the_best_model_of_rounds_after_the_last_checkpoint_is_kept(tmp_path):
    """A kill loses the rounds after the checkpoint, and the file is ahead of the records."""
    path = tmp_path / "best.safetensors"
    options = {"participation": 1.0}  # the loss falls
    start(tmp_path / "killed", rounds=2, **options)
    start(tmp_path / "whole", rounds=4, callbacks=[SaveBest(path, "train_loss")], **options)
    file = path.stat()
    best = SaveBest(path, "train_loss")
    start(tmp_path / "killed", rounds=4, resume=True, callbacks=[best], **options)
    assert best.round == 4 and path.stat().st_mtime_ns == file.st_mtime_ns


def test_a_metric_that_was_added_at_resume_counts_from_there(tmp_path):
    start(tmp_path / "run", rounds=3)
    path, options = tmp_path / "best.safetensors", {"metrics": {"f1": lambda outputs, labels: 0.5}, "resume": True}
    stopping, best = EarlyStopping("test_f1", patience=2), SaveBest(path, "test_f1")
    result = start(tmp_path / "run", rounds=9, callbacks=[stopping, best], **options)
    assert len(result.history) == 6 and stopping.round == best.round == 4
    with pytest.raises(fed.CallbackError, match="no 'test_f2' .did you mean 'test_f1'"):
        start(tmp_path / "run", rounds=9, callbacks=[EarlyStopping("test_f2", mode="max")], **options)


def test_a_metric_that_is_not_there(tmp_path, caplog):
    with pytest.raises(fed.CallbackError, match="no 'test_acuracy' .did you mean 'test_accuracy'"):
        start(tmp_path / "run", callbacks=[EarlyStopping("test_acuracy", mode="max")])
    with caplog.at_level(logging.WARNING, "fastsam.fed"):
        fed.run(
            torch.nn.Linear(2, 2), [(torch.ones(2, 2), torch.tensor([0, 1]))], fed.FedAvg(), rounds=1,
            callbacks=[EarlyStopping()],
        )  # fmt: skip
    assert "EarlyStopping: 'test_loss' had no value in any round" in caplog.text
