"""Progress of a run, on a terminal and without one."""

from __future__ import annotations

import pytest
from rich.console import Console

from fastsam.fed import callbacks
from fastsam.fed.callbacks.terminal import Countdown, RunProgress, counted, describe, duration


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


def test_progress_of_one_run_among_many_is_its_last_line(capsys: pytest.CaptureFixture) -> None:
    with RunProgress(Console(force_terminal=False, width=60), "fedsam", 40, every=40) as progress:
        for i in range(1, 41):
            progress({"round": i, "train_loss": 0.5, "test_accuracy": None})
    assert capsys.readouterr().out.splitlines() == ["fedsam: round 40/40  loss 0.5000"]


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


@pytest.mark.parametrize("terminal", [True, False])
def test_reading_that_takes_its_time_is_shown_on_a_terminal(terminal, capsys, monkeypatch) -> None:
    things = list(range(40))
    console = Console(force_terminal=terminal, width=80)
    assert list(counted(things, "reading clients", console)) == things and not capsys.readouterr().out, "it was quick"
    monkeypatch.setattr(callbacks.terminal, "_PATIENCE", -1.0)
    assert list(counted(things, "reading clients", console)) == things
    assert ("reading clients" in capsys.readouterr().out) is terminal


def test_describe_leaves_out_what_a_round_does_not_have() -> None:
    assert describe({"round": 1, "train_loss": 1.0, "test_accuracy": None}) == "loss 1.0000"


def test_a_countdown_of_runs() -> None:
    """Four runs: the first was done before, the second takes a minute, the third twenty minutes."""
    clock = iter([0.0, 1.0, 61.0, 61.0, 1261.0, 1261.0])
    countdown = Countdown(4, lambda: next(clock))
    assert countdown.next() == "1/4 " and countdown.next() == "2/4 "
    countdown.trained()
    assert countdown.next() == "3/4, 2.0 min left "
    countdown.trained()
    assert countdown.next() == "4/4, 10 min left "
    assert Countdown(1).next() == ""
    assert [duration(s) for s in (4, 89, 90, 600, 5399, 5400, 40000)] == [
        "4 s", "89 s", "1.5 min", "10 min", "90 min", "1.5 h", "11 h",
    ]  # fmt: skip
