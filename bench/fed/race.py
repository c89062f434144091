"""Contenders in processes of their own that take turns, a chunk of rounds each: what disturbs one disturbs all."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from bench.environment import ROOT
from bench.fed.workload import CLASSES, Workload
from bench.timing import Summary, interleave

LOSS_RATIO = 1.3  # of the gate: clients are sampled differently, so losses differ a little
PATIENCE, FAREWELL = 600.0, 20.0  # seconds for one answer, and for an end after the last


@dataclass(frozen=True)
class Entry:
    """One that takes part. label: in tables. python: whose environment has it. ranks: processes, by torchrun.

    longer: times as many rounds a chunk, for who would be done before a processor that has waited is at its speed
    again.
    """

    label: str
    contender: str
    workload: Workload
    python: str = sys.executable
    threads: int = 1
    ranks: int = 1
    longer: int = 1


@dataclass(frozen=True)
class Figure:
    """One entry's result. speed: rounds per second relative to the race's unit. problem: why there is none."""

    label: str
    seconds: Summary | None = None
    speed: Summary | None = None
    loss: float | None = None
    peak_mib: float | None = None
    problem: str | None = None


@dataclass(frozen=True)
class Result:
    figures: list[Figure]
    # processors' worth of time that all processes used; more than one: the machine was not calm, or threads were asked
    # for
    busy: float


class Worker:
    """An entry's process."""

    def __init__(self, entry: Entry, chunks: int, rounds: int) -> None:
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - a pipe that nobody reads would fill
        launcher = []
        if entry.ranks > 1:
            launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={entry.ranks}"]
        counts = (chunks, rounds * entry.longer, entry.threads)
        arguments = [entry.contender, json.dumps(asdict(entry.workload)), *map(str, counts)]
        self.process = subprocess.Popen(
            [entry.python, *launcher, "-m", "bench.fed.worker", *arguments],
            cwd=ROOT,
            env=os.environ | _pools(entry.threads),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
        )

    def answer(self) -> Any:
        """Its next word. Raises RuntimeError with the end of its log when it died, or said nothing for `PATIENCE`
        seconds."""
        assert self.process.stdout is not None
        timer = threading.Timer(PATIENCE, self.process.terminate)
        timer.start()
        line = self.process.stdout.readline()
        timer.cancel()
        if not line:
            self.process.wait()
            self.log.seek(0)
            said = self.log.read().strip().splitlines()
            raise RuntimeError(said[-1] if said else f"exit {self.process.returncode}")
        return json.loads(line)

    def chunk(self) -> float:
        """Seconds of a round of one more chunk. Raises RuntimeError as `answer` does."""
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # it has died since: its log says why
            self.process.stdin.write("\n")
            self.process.stdin.flush()
        return float(self.answer())

    def close(self) -> None:
        """Its end. It is asked first: a process that is killed leaves behind what it has started (ranks, actors)."""
        for ask in (lambda: None, self.process.terminate, self.process.kill):
            ask()
            try:
                self.process.communicate(timeout=FAREWELL)
                break
            except subprocess.TimeoutExpired:
                continue
        self.log.close()


def _pools(threads: int) -> dict[str, str]:
    """The threads of every library's own pool."""
    n = str(threads)
    flags = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1" if threads == 1 else ""
    return {"OMP_NUM_THREADS": n, "MKL_NUM_THREADS": n, "XLA_FLAGS": flags}


def race(entries: Sequence[Entry], chunks: int, rounds: int) -> Result:
    """Race all entries, interleaved; the first is the unit. An entry that dies is left out from then on, with its last
    words.

    A figure counts only if training worked: the loss over all data, after as many rounds or more, is near that of the
    unit. If the unit trains on other data or another model, the loss must be better than a guess.
    """
    workers: dict[str, Worker] = {}
    problems: dict[str, str] = {}

    def ask(label: str, word: Callable[[], Any]) -> Any:
        """Return what a worker says; None from a worker that says nothing more, whose problem is noted."""
        if label in problems:
            return None
        try:
            return word()
        except (RuntimeError, ValueError) as error:
            problems[label] = str(error)
            return None

    try:
        for entry in entries:
            workers[entry.label] = worker = Worker(entry, chunks, rounds)
            ask(entry.label, worker.answer)
        samples = {label: partial(ask, label, worker.chunk) for label, worker in workers.items()}
        taken = interleave(samples, chunks, warm=False)
        ends = {label: ask(label, worker.answer) for label, worker in workers.items()}
    finally:
        for worker in workers.values():
            worker.close()
    return Result([_figure(entry, entries[0], taken.seconds, ends, problems) for entry in entries], taken.others)


def _figure(
    entry: Entry, unit: Entry, seconds: dict[str, list[float]], ends: dict[str, Any], problems: dict[str, str]
) -> Figure:
    label = entry.label
    if label in problems or unit.label in problems:
        return Figure(label, problem=problems.get(label, f"the unit {unit.label!r} failed"))
    loss, peak = ends[label]["loss"], ends[label]["peak_mib"]
    bound = LOSS_RATIO * ends[unit.label]["loss"] + 0.05 if _alike(entry, unit) else math.log(CLASSES)
    if not loss <= bound:
        return Figure(label, loss=loss, problem=f"it did not train: loss {loss:.3g}, at most {bound:.3g} was expected")
    speed = Summary.of_ratios(seconds[unit.label], seconds[label])
    return Figure(label, Summary.of(seconds[label]), speed, loss, peak)


def _alike(entry: Entry, unit: Entry) -> bool:
    """Whether both train the same model on the same clients."""
    a, b = entry.workload, unit.workload
    return (a.model, a.clients, a.cohort) == (b.model, b.clients, b.cohort)
