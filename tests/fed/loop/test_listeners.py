"""When callbacks are called, what they see, and how they end a run."""

import json
import logging
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fastsam import fed
from fastsam.fed.loop.outliers import OUTLIER_FACTOR, outliers
from tests.helpers import oracle
from tests.helpers.fed_input import start as start_small
from tests.helpers.fed_rundir import Alarm, records, start
from tests.helpers.fed_runs import FLOAT, same_bits


class Diary(fed.Callback):
    """Writes down what it hears."""

    def __init__(self) -> None:
        self.records: list[tuple[Any, ...]] = []

    def on_start(self, run: fed.callbacks.RunView) -> None:
        self.records.append(("start", run.round, [record["round"] for record in run.history]))

    def on_evaluation(self, run: fed.callbacks.RunView, record: dict[str, Any]) -> None:
        self.records.append(("evaluation", record["round"], record["test_loss"] is not None))

    def on_round(self, run: fed.callbacks.RunView, record: dict[str, Any]) -> None:
        self.records.append(("round", run.round, record["round"], record == run.history[-1]))

    def on_end(self, run: fed.callbacks.RunView, result: fed.Result | None) -> None:
        self.records.append(("end", run.round, result and len(result.history), type(run.error).__name__, run.stopped))


def test_when_the_methods_are_called(tmp_path):
    diary = Diary()
    start(tmp_path / "run", rounds=3, eval_every=2, callbacks=[diary])
    assert diary.records == [
        ("start", 0, []), ("round", 1, 1, True), ("evaluation", 2, True), ("round", 2, 2, True),
        ("evaluation", 3, True), ("round", 3, 3, True), ("end", 3, 3, "NoneType", None),
    ]  # fmt: skip
    repeat = Diary()
    start(tmp_path / "run", rounds=4, eval_every=2, callbacks=[repeat], resume=True)
    assert repeat.records[0] == ("start", 3, [1, 2, 3]) and [e[:2] for e in repeat.records[1:]] == [
        ("evaluation", 4),
        ("round", 4),
        ("end", 4),
    ]


def test_the_run_directory_is_complete_at_the_end_and_its_config_is_told(tmp_path):
    class Looks(fed.Callback):
        def on_end(self, run, result):
            files = {path.name for path in run.run_dir.iterdir()}
            assert {"summary.json", "model.safetensors", "metrics.jsonl"} <= files and run.run_dir == result.run_dir
            self.config, self.rounds = run.config, run.rounds

    looks = Looks()
    start(tmp_path / "run", lr=0.07, callbacks=[looks])
    assert (looks.config["algorithm"], looks.config["lr"], looks.rounds) == ("MoFedSAM", 0.07, 3)
    start(tmp_path / "other", callbacks=[looks], config={"mine": 1})
    assert looks.config == {"mine": 1}


def test_a_callback_changes_no_bit(tmp_path):
    """Callbacks cannot change it by writing into arguments, drawing random numbers or switching autograd off."""

    class Vandal(fed.Callback):
        def on_start(self, run):
            run.config.clear()
            self.models = [run.model()]

        def on_round(self, run, record):
            model = run.model()
            torch.rand(5)
            with torch.no_grad():
                for p in model.parameters():
                    p.fill_(float("nan"))
            model.train(False)
            record.clear()
            for one in run.history:
                one.clear()
            self.models.append(run.model())

    vandal = Vandal()
    plain = start(tmp_path / "plain")
    watched_result = start(tmp_path / "watched", callbacks=[vandal])
    assert same_bits(plain.model, watched_result.model) and records(tmp_path / "plain") == records(tmp_path / "watched")
    assert same_bits(vandal.models[-1], plain.model) and not same_bits(vandal.models[0], plain.model)


def test_a_stopped_run_ends_as_if_its_rounds_were_over(tmp_path):
    diary, options = Diary(), {"checkpoint_every": 100}
    result = start(tmp_path / "run", rounds=9, callbacks=[Alarm(2, fed.Stop("enough")), diary], **options)
    two = start(tmp_path / "two", rounds=2)
    assert len(result.history) == 2 and same_bits(result.model, two.model)
    assert result.summary()["stopped"] == "enough" and two.summary()["stopped"] is None
    assert diary.records[-2:] == [("round", 2, 2, True), ("end", 2, 2, "NoneType", "enough")]
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["stopped"] == "enough"
    # The directory holds the last round, from which a run without the callback continues.
    longer = start(tmp_path / "run", rounds=5, resume=True, **options)
    full_run = start(tmp_path / "whole", rounds=5)
    assert same_bits(longer.model, full_run.model) and records(tmp_path / "run") == records(tmp_path / "whole")
    assert longer.summary()["stopped"] is None


def test_stopped_before_the_first_round(tmp_path):
    class Never(fed.Callback):
        def on_start(self, run):
            raise fed.Stop

    result = start(tmp_path / "run", callbacks=[Never()])
    assert result.history == [] and result.summary()["stopped"] == "Never stopped the run"


@pytest.mark.parametrize(
    ("method", "words", "rounds"),
    [
        ("on_start", r"Breaks.on_start failed after 0 rounds: KeyError: 'x'", 0),
        ("on_evaluation", r"Breaks.on_evaluation failed in round 1: KeyError: 'x'", 1),
        ("on_round", r"Breaks.on_round failed in round 1: KeyError: 'x'", 1),
        ("on_end", r"Breaks.on_end failed after 3 rounds: KeyError: 'x'", 3),
    ],
)
def test_a_callback_that_raises_is_named_and_the_last_round_is_kept(tmp_path, method, words, rounds):
    def breaks(self, *arguments):
        raise KeyError("x")

    diary, second_diary = Diary(), Diary()
    callbacks = [diary, type("Breaks", (), {method: breaks})(), second_diary]
    with pytest.raises(fed.CallbackError, match=words) as error_info:
        start(tmp_path / "run", callbacks=callbacks, checkpoint_every=100)
    assert isinstance(error_info.value.__cause__, KeyError)
    assert json.loads((tmp_path / "run" / "checkpoint" / "manifest.json").read_text())["round"] == rounds
    assert len(records(tmp_path / "run") if rounds else []) == rounds
    error = "NoneType" if method == "on_end" else "CallbackError"
    assert diary.records[-1][0] == "end" and diary.records[-1][3] == error
    assert (second_diary.records[-1:] == []) if method == "on_start" else (second_diary.records[-1][0] == "end")
    resumed_result = start(tmp_path / "run", resume=True)
    full_run = start(tmp_path / "whole")
    assert same_bits(resumed_result.model, full_run.model)


def test_the_end_is_told_after_an_error_too_and_does_not_hide_it(caplog):
    class Bad(fed.Callback):
        def on_end(self, run, result):
            raise ValueError("closed already")

    diary = Diary()
    with pytest.raises(KeyboardInterrupt), caplog.at_level(logging.ERROR, "fastsam.fed"):
        start_small(rounds=3, callbacks=[Bad(), diary, Alarm(2, KeyboardInterrupt())])
    assert diary.records[-1] == ("end", 2, None, "KeyboardInterrupt", None)
    assert "Bad.on_end failed after 2 rounds: ValueError: closed already" in caplog.text


@pytest.mark.parametrize(
    ("progress", "terminal", "is_table"),
    [(None, True, True), (None, False, False), (False, True, False), (True, False, True)],
)
def test_a_bar_where_there_is_a_terminal(progress, terminal, is_table, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal, raising=False)
    start(tmp_path / "run", progress=progress)
    records = capsys.readouterr()
    assert records.out == "" and ("3/3" in records.err) == is_table
    assert ("everything is in" in records.err and str(tmp_path / "run") in records.err.replace("\n", "")) == is_table


# --- A client that moves far beyond its cohort is named once in the log and in every record, and nothing else changes.


SIZES = (8, 8, 8, 8, 8, 8)


def data(poison: float = 1.0, sizes: tuple[int, ...] = SIZES) -> list[Any]:
    """The samples of client 3 are multiplied by `poison`."""
    return [(x * poison if i == 3 else x, y) for i, (x, y) in enumerate(oracle.ragged_clients(FLOAT, sizes))]


def train(clients: list[Any], algorithm: fed.Algorithm | None = None, **options: Any) -> fed.Result:
    torch.manual_seed(0)
    base: dict[str, Any] = {"rounds": 3, "participation": 1.0, "batch_size": 4, "executor": "sequential"}
    return fed.run(nn.Linear(6, 3), clients, algorithm or fed.FedAvg(), **(base | options))


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name == "fastsam.fed" and "times as far" in r.getMessage()]


@pytest.mark.parametrize(("executor", "slots"), [("sequential", None), ("threads", 2), ("vmap", 4)])
def test_it_is_named_once_and_recorded_always(caplog: pytest.LogCaptureFixture, executor: str, slots: Any) -> None:
    result = train(data(1e6), executor=executor, slots=slots)
    (line,) = warnings_of(caplog)
    assert re.match(
        r"round 1: client 3 moved [\d.]+e\+0\d times as far as the median of its cohort, .*aggregation='norm_filter'",
        line,
    )
    assert caplog.records[-1].levelno == logging.WARNING
    assert [[outlier["client"] for outlier in r["outliers"]] for r in result.history] == [[3]] * 3
    factor = result.history[0]["outliers"][0]["factor"]
    assert f"{factor:.3g}" in line and factor > 1e3


def test_an_ordinary_cohort_is_not_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    result = train(data(), fed.SCAFFOLD())
    assert warnings_of(caplog) == [] and [r["outliers"] for r in result.history] == [[]] * 3


def test_a_resumed_run_does_not_say_it_again(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    train(data(1e6), rounds=1, run_dir=tmp_path / "run")
    assert len(warnings_of(caplog)) == 1
    train(data(1e6), rounds=2, run_dir=tmp_path / "run", resume=True)
    assert len(warnings_of(caplog)) == 1


def test_with_a_robust_rule_it_says_what_stands_against_it(caplog: pytest.LogCaptureFixture) -> None:
    train(data(1e6), aggregation="median")
    (line,) = warnings_of(caplog)
    assert line.endswith("against which aggregation='median' stands")


def test_what_was_shortened_or_excluded_is_none(caplog: pytest.LogCaptureFixture) -> None:
    assert train(data(1e6), privacy=fed.Privacy(clip=0.1)).history[0]["outliers"] == []
    result = train(data(1e38))
    assert result.history[0]["outliers"] == [] and result.history[0]["excluded"][0]["client"] == 3
    assert warnings_of(caplog) == []


def test_the_limit() -> None:
    steps, norms = dict.fromkeys(range(5), 2), dict.fromkeys(range(5), 1.0)
    assert outliers({**norms, 2: OUTLIER_FACTOR}, steps) == {}
    assert outliers({**norms, 2: OUTLIER_FACTOR + 1, 0: 2 * OUTLIER_FACTOR}, steps) == {
        0: 2 * OUTLIER_FACTOR,
        2: OUTLIER_FACTOR + 1,
    }
    assert outliers({**norms, 2: 3 * OUTLIER_FACTOR}, {**steps, 2: 6}) == {}  # three times the number of steps
    assert outliers({**norms, 2: OUTLIER_FACTOR + 1}, {**steps, 2: 1}) == {
        2: OUTLIER_FACTOR + 1
    }  # the number of steps is not relevant here
    assert outliers({0: 1.0, 1: 1e9}, steps) == {}  # with two clients it is unknown which one is wrong
    assert outliers({0: 1.0, 1: 1e9, 2: 1.0}, steps) == {1: 1e9}
    assert outliers({**dict.fromkeys(range(5), 0.0), 2: 1.0}, steps) == {}
