"""Progress of a run on the terminal: a live bar, or plain lines where there is no terminal."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console


class RunProgress:
    """Shows one run; call it with each round's metrics record. A context manager.

    On a terminal one line moves. Elsewhere (a file, CI) there is a line for the first and the last round and for every
    `every` rounds, so that logs stay short.

    Args:
        console: rich's console.
        label: name of the run.
        rounds: number of rounds.
        every: rounds between lines, by default a tenth of the rounds; `rounds` for only the last line.
    """

    def __init__(self, console: Console, label: str, rounds: int, every: int | None = None) -> None:
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )

        self.console, self.label, self.rounds = console, label, rounds
        self.every = every or max(1, rounds // 10)
        self.is_visible, self.is_narrow = False, console.width < 110
        columns = (
            TextColumn("{task.description:<12}"),
            BarColumn(8 if self.is_narrow else 20),
            MofNCompleteColumn(),
            TextColumn("{task.fields[state]}"),
        )
        one_time = TimeRemainingColumn(compact=True, elapsed_when_finished=True)
        times = (one_time,) if self.is_narrow else (TimeElapsedColumn(), TimeRemainingColumn())
        self.bar = Progress(*columns, *times, console=console, disable=not console.is_terminal)
        self.task = self.bar.add_task(label, total=rounds, state="")

    def __enter__(self) -> RunProgress:
        self.bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        done_before = kind is None and not self.is_visible
        if done_before:
            self.bar.update(self.task, completed=self.rounds, state="done before")
        self.bar.stop()
        if done_before and not self.console.is_terminal:
            self._line(f"all {self.rounds} rounds were done before")

    def __call__(self, record: dict[str, Any]) -> None:
        self.is_visible = True
        num_rounds, state = record["round"], describe(record)
        if self.console.is_terminal:
            state = state.partition("  clients")[0] if self.is_narrow else state  # with it the times are cut off
            self.bar.update(self.task, completed=num_rounds, state=state)
        elif (
            num_rounds % self.every == 0 or num_rounds == self.rounds or (num_rounds == 1 and self.every < self.rounds)
        ):
            self._line(f"round {num_rounds}/{self.rounds}  {state}")

    def end(self, stop_reason: str | None, directory: Path | None) -> None:
        """Print why the run was stopped, if it was, and where its files are."""
        self.is_visible = self.is_visible or stop_reason is not None
        self.bar.stop()
        if stop_reason is not None:
            self._line(f"stopped: {stop_reason}")
        if directory is not None:
            self._line(f"everything is in {directory}")

    def _line(self, text: str) -> None:
        self.console.print(f"{self.label}: {text}", highlight=False, soft_wrap=True, markup=False)


class Countdown:
    """Names the next of several runs and estimates the time of all of them. Runs that were done before take no time."""

    def __init__(self, runs: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.runs, self.clock = runs, clock
        self._number = self._num_trained = 0
        self._seconds = self._began = 0.0

    def next(self) -> str:
        """Return a prefix for the run that begins, such as "7/36, 12 min left ", or "" for a single run."""
        self._number, self._began = self._number + 1, self.clock()
        if self.runs == 1:
            return ""
        seconds_left = self._seconds / max(self._num_trained, 1) * (self.runs - self._number + 1)
        return f"{self._number}/{self.runs}{f', {duration(seconds_left)} left' if self._num_trained else ''} "

    def add_trained(self) -> None:
        """Count a run that was trained, when it is over."""
        self._num_trained, self._seconds = self._num_trained + 1, self._seconds + self.clock() - self._began


def duration(seconds: float) -> str:
    """Return a duration in the unit that suits it, such as "12 min"."""
    for unit, size in (("h", 3600), ("min", 60)):
        if seconds >= 1.5 * size:
            return f"{seconds / size:.1f} {unit}" if seconds < 10 * size else f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def describe(record: dict[str, Any]) -> str:
    """Return the main numbers of a round, as far as the record has them."""
    parts = [f"loss {record['train_loss']:.4f}"] if record.get("train_loss") is not None else []
    if record.get("test_accuracy") is not None:
        parts.append(f"test {100 * record['test_accuracy']:.2f} %")
    if record.get("client_accuracy_mean") is not None:
        parts.append(
            f"clients {100 * record['client_accuracy_mean']:.2f} ± {100 * record['client_accuracy_std']:.2f} %"
        )
    keys = {"test_accuracy"} if record.get("test_accuracy") is None else {"test_accuracy", "test_loss"}
    extra = {key: v for key, v in record.items() if key.startswith("test_") and key not in keys and v is not None}
    return "  ".join([*parts, *(f"{key.replace('_', ' ')} {value:.4g}" for key, value in extra.items())])
