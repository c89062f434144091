"""Attacks: trials that are drawn from their number and run, each in a separate process, until a deadline.

A trial that returns has found nothing. An exception, a signal that ends its process, and silence for longer than
`patience` are failures. Trials of values are drawn by hypothesis, many in one process. Hypothesis simplifies a failing
trial and stores it in a folder of examples, with which the next run begins.
"""

import faulthandler
import json
import os
import random
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import seed as seeded
from hypothesis import strategies as st
from hypothesis.database import DirectoryBasedExampleDatabase

STRIDE = 1_000_000  # numbers of trials that belong to a seed
_OUTPUT_LENGTH = 800  # characters of the start and of the end of a failing trial's output that are reported


@dataclass(frozen=True)
class Trial:
    """One trial of an attack. All values that it draws from `rng` follow from its number.

    Attributes:
        number (int): number of the trial.
        folder: private folder, empty at the start.
        common: object that the attack prepared for all trials.
    """

    number: int
    folder: Path
    common: Any
    rng: random.Random


@dataclass
class Count:
    """Results of an attack: number of trials, failures with the number that repeats each, or why it was left out."""

    trials: int = 0
    left_out: str | None = None
    failures: list[dict[str, Any]] = field(default_factory=list)
    seconds: float = 0.0


@dataclass(frozen=True)
class Attack:
    """A promise, and the trials that try to break it.

    Args:
        trial: function that returns the number of things it tried; its output is stored with the report of a failure.
        prepare: function that makes the object that all trials have in common, once in a folder.
        share (float): share of the time of all attacks.
        patience (float): seconds after which a trial hangs.
        uses_fork (bool): False for trials that start processes and must not be ended by the attacked code.
        values (int): number of trials of values that hypothesis draws in one process; 0 for other trials.
        why_not: function that returns the reason why the attack cannot run here, or None.
    """

    name: str
    promise: str
    trial: Callable[[Trial], int]
    prepare: Callable[[Path], Any] | None = None
    share: float = 1.0
    patience: float = 120.0
    uses_fork: bool = True
    values: int = 0
    why_not: Callable[[], str | None] = lambda: None

    def __call__(self, seed: int, deadline: float, examples: Path | None = None) -> Count:
        """Make trials number `seed * STRIDE` and on, at least one, until `deadline` (of `time.monotonic`). Trials of
        values end with the first failure, which the folder `examples` keeps."""
        folder = examples and examples / self.name
        goes_on = lambda count: time.monotonic() < deadline and not (self.values and count.failures)  # noqa: E731
        return self._trials(seed * STRIDE, goes_on, folder)

    def first(self, seed: int, trials: int) -> Count:
        """Make the first trials of a seed."""
        numbers = iter(range(trials - 1))
        return self._trials(seed * STRIDE, lambda count: next(numbers, None) is not None, None)

    def repeat(self, number: int) -> Count:
        """Make one trial."""
        return self._trials(number, lambda count: False, None)

    def _trials(self, number: int, goes_on: Callable[[Count], bool], examples: Path | None) -> Count:
        count, start = Count(left_out=self.why_not()), time.monotonic()
        if count.left_out:
            return count
        with TemporaryDirectory(prefix="fastsam-attack-") as place:
            common = None if self.prepare is None else self.prepare(Path(place))
            while True:
                tries, failure = self._run_trial(number, common, examples)
                count.trials += tries
                if failure:
                    count.failures.append({"number": number, "what": failure})
                number += 1
                if not goes_on(count):
                    break
        count.seconds = time.monotonic() - start
        return count

    def _run_trial(self, number: int, common: Any, examples: Path | None) -> tuple[int, str]:
        """Return the number of things that were tried, and the text of a failure."""
        with TemporaryDirectory(prefix="fastsam-trial-") as place:
            (folder := Path(place) / "own").mkdir()
            trial = Trial(number, folder, common, random.Random(number))
            work = (lambda: _try_values(self, trial, examples)) if self.values else (lambda: self.trial(trial))
            return _run_in_child(trial, self.patience, work) if self.uses_fork else _outcome(work)


def _try_values(attack: Attack, trial: Trial, examples: Path | None) -> int:
    """Try what hypothesis draws, after the failures that it remembers. Raises the simplest failure that it finds."""
    tries = 0

    @settings(
        max_examples=attack.values, deadline=None, suppress_health_check=list(HealthCheck),
        database=None if examples is None else DirectoryBasedExampleDatabase(examples),
    )  # fmt: skip
    @seeded(trial.number)  # below the settings, because it takes the database away
    @given(st.randoms(use_true_random=False))
    def draw(rng: random.Random) -> None:
        nonlocal tries
        tries += attack.trial(replace(trial, rng=rng))

    draw()
    return tries


def _outcome(work: Callable[[], int]) -> tuple[int, str]:
    try:
        return work(), ""
    except Exception as error:
        traceback.print_exc()
        frame = traceback.extract_tb(error.__traceback__)[-1]
        return 1, f"{type(error).__name__}: {error} ({Path(frame.filename).name}:{frame.lineno})"


def _run_in_child(trial: Trial, patience: float, work: Callable[[], int]) -> tuple[int, str]:
    answer, output = trial.folder.with_name("answer"), trial.folder.with_name("said")
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        try:
            os.setsid()  # a new session, so that child processes end with it
            _redirect_output(output)
            answer.write_text(json.dumps(_outcome(work)))
        finally:
            os._exit(0)
    try:
        code = _wait(pid, patience)
    finally:
        _end_group(pid)
    if code == 0 and answer.is_file():
        tries, failure = json.loads(answer.read_text())
    else:
        tries, failure = 1, _describe_end(code, patience)
    words = output.read_text(errors="replace").strip() if failure and output.is_file() else ""
    if len(words) > 2 * _OUTPUT_LENGTH:
        words = f"{words[:_OUTPUT_LENGTH]}\n...\n{words[-_OUTPUT_LENGTH:]}"
    return tries, f"{failure}\n{words}".strip()


def _redirect_output(file: Path) -> None:
    """Redirect output and the stack of a fatal signal to a file."""
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stdout = sys.stderr = os.fdopen(descriptor, "w", buffering=1)
    faulthandler.enable(2)


def _wait(pid: int, patience: float) -> int | None:
    """Return the exit code, as `os.waitstatus_to_exitcode` has it, or None if the process had to be killed."""
    descriptor = os.pidfd_open(pid)
    try:
        has_ended = bool(select.select([descriptor], [], [], patience)[0])
    finally:
        os.close(descriptor)
    if not has_ended:
        os.kill(pid, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return code if has_ended else None


def _end_group(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def _describe_end(code: int | None, patience: float) -> str:
    if code is None:
        return f"hangs: nothing after {patience:g} s"
    return f"ended by {signal.Signals(-code).name}" if code < 0 else f"the process ended with {code} and no answer"
