"""Signals, hangs, exceptions and silence are failures of an attack, each with the number that repeats it."""

import ctypes
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from tests.attack import report
from tests.attack.plan import ATTACKS
from tests.attack.trials import STRIDE, Attack, Trial


def end_by_kind(trial: Trial) -> int:
    """Fail in five of six trials, each time in a different way."""
    kind = trial.number % 6
    print(f"kind {kind}", flush=True)
    if kind == 1:
        ctypes.string_at(0)
    if kind == 2:
        raise ValueError("mine")
    if kind == 3:
        time.sleep(60)
    if kind == 4:
        os._exit(0)
    if kind == 5:
        raise KeyboardInterrupt
    return 7


MESSAGES = {
    1: "ended by SIGSEGV", 2: "ValueError: mine (test_trials.py:", 3: "hangs: nothing after 0.5 s",
    4: "the process ended with 0 and no answer", 5: "the process ended with 0 and no answer",
}  # fmt: skip


@pytest.mark.parametrize("kind", MESSAGES)
def test_whatever_ends_a_trial_is_a_failure(kind: int) -> None:
    attack = Attack("mine", "", end_by_kind, patience=0.5)
    count = attack.repeat(kind)
    assert count.trials == 1
    (failure,) = count.failures
    assert (
        failure["number"] == kind and failure["what"].startswith(MESSAGES[kind]) and f"kind {kind}" in failure["what"]
    )


def test_trials_follow_from_the_seed_and_a_failure_from_its_number() -> None:
    def trial(trial: Trial) -> int:
        assert not list(trial.folder.iterdir()) and trial.common == "prepared"
        value = trial.rng.random()
        assert value < 0.7, f"{value}"
        return 2

    attack = Attack("mine", "", trial, prepare=lambda folder: "prepared")
    count = attack(3, time.monotonic() + 0.4)
    assert count.failures and (count.trials - len(count.failures)) % 2 == 0, "two of each trial, one of a failure"
    for failure in count.failures[:2]:
        assert failure["number"] >= 3 * STRIDE and attack.repeat(failure["number"]).failures == [failure]


def test_values_that_fail_are_simple_and_are_found_again(tmp_path: Path) -> None:
    def trial(trial: Trial) -> int:
        value = trial.rng.randint(0, 10**6)
        print(f"drawn {value}")
        assert value < 1234
        return 1

    attack = Attack("mine", "", trial, values=20)
    count = attack(3, time.monotonic() + 30, tmp_path)
    (failure,) = count.failures
    assert failure["what"].rstrip().endswith("drawn 1234") or "drawn 1234\n" in failure["what"]
    assert attack.repeat(failure["number"]).failures, "the number gives it without the folder"
    assert list((tmp_path / "mine").iterdir())
    next_count = Attack("mine", "", trial, values=1)(999, 0.0, tmp_path)
    assert next_count.failures and next_count.failures[0]["number"] == 999 * STRIDE, "another seed begins with it"
    assert not Attack("another", "", lambda trial: 1, values=20)(3, 0.0, tmp_path).failures


def test_one_that_cannot_run_says_so() -> None:
    count = Attack("mine", "", end_by_kind, why_not=lambda: "no compiler")(0, 0.0)
    assert (count.trials, count.left_out) == (0, "no compiler")
    assert "left out: no compiler" in report.line({"name": "mine", "promise": "", **vars(count)})


def make_record(**changes: Any) -> dict[str, Any]:
    environment = {
        "command": "python -m tests.attack --minutes 10", "date": "2031-02-03T00:00:00+00:00",
        "commit": "0123456789abcdef",
        "machine": {"cpu": "CPU", "cores": 2}, "versions": {"python": "3.11", "torch": "2.13"},
    }  # fmt: skip
    attack = {
        "name": "mine", "promise": "nothing ends", "trials": 1200, "failures": [], "seconds": 60.0, "left_out": None,
    }  # fmt: skip
    return {"kind": report.KIND, "environment": environment, "seed": 0, "minutes": 1, "attacks": [attack | changes]}


def test_the_page_is_filled_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "made.json").write_text(json.dumps(make_record()))
    page = report.PAGE.fill(
        "a\n<!-- attack:last -->\nold\n<!-- /attack -->\nb\n", report.PAGE.read(tmp_path / "made.json")
    )
    assert "| `mine` | nothing ends | 1,200 | 0 |" in page and "old" not in page
    assert page.startswith("a\n") and page.endswith("\nb\n")
    with pytest.raises(ValueError, match="no place marked"):
        report.PAGE.fill("", make_record())
    (tmp_path / "made.json").write_text("{}")
    with pytest.raises(ValueError, match="must be a record of"):
        report.PAGE.read(tmp_path / "made.json")


def test_a_failure_is_shown_with_the_command_that_repeats_it() -> None:
    failures = [{"number": i, "what": "first\nsecond"} for i in range(7)]
    text = report.line(make_record(failures=failures)["attacks"][0])
    assert "python -m tests.attack --only mine --number 4\n    first\n    second" in text and "and 2 more" in text


def test_the_page_has_the_figures_of_the_last_run() -> None:
    record = report.PAGE.read(report.PAGE.results)
    assert {row["name"] for row in record["attacks"]} >= {attack.name for attack in ATTACKS}
    page = report.PAGE.path.read_text()
    assert report.PAGE.fill(page, record) == page, "it differs: python -m tests.attack.report"
