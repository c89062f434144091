"""Contenders in separate processes that take turns, a chunk of rounds each: a disturbance reaches all of them."""

import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from bench.fed.process import Process
from bench.fed.workload import CLASSES, Workload
from bench.record import has_failed
from bench.timing import Rounds, interleave, ratios, summary

# Allowed by the correctness check. Each contender samples its own clients, and a CNN still learns fast after the 26
# rounds of a race: twelve bare loops ended between 0.51 and 0.75, fifteen of FedLab between 0.50 and 0.74.
LOSS_RATIO = 1.6


@dataclass(frozen=True)
class Entry:
    """A contender of a race.

    Args:
        label: name in tables.
        contender: its module and option, as bench/fed/worker.py takes them.
        python: interpreter whose environment has it.
        ranks (int): number of processes, started by torchrun.
        cores (int): number of cores that its processes may use.
        longer (float): factor on the rounds of a chunk. It lengthens chunks that would end before an idle processor
            has reached its full speed again, and shortens chunks that take very long.
        ours (bool): True if its failure is a failure of the benchmark.
    """

    label: str
    contender: str
    workload: Workload
    python: str = sys.executable
    threads: int = 1
    ranks: int = 1
    cores: int = 1
    longer: float = 1
    ours: bool = True

    def start(self, chunks: int, rounds: int) -> Process:
        """Start its process. Every library's thread pool has `threads` threads."""
        launcher = []
        if self.ranks > 1:
            launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={self.ranks}"]
        counts = map(str, (chunks, max(1, round(rounds * self.longer)), self.threads))
        arguments = [self.contender, json.dumps(asdict(self.workload)), *counts]
        n = str(self.threads)
        flags = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1" if self.threads == 1 else ""
        pools = {"OMP_NUM_THREADS": n, "MKL_NUM_THREADS": n, "XLA_FLAGS": flags}
        return Process([self.python, *launcher, "-m", "bench.fed.worker", *arguments], pools, num_cores=self.cores)


def turns(entries: Sequence[Entry], chunks: int, rounds: int) -> tuple[Rounds, list[dict[str, Any]]]:
    """Let all entries train, interleaved. Return their samples, and a row for each entry: its cores and the processors
    in use, and loss and memory or a problem.

    An entry that dies is left out from then on, and its row has its last words. A sample counts only if training
    worked: the loss over all data must be near the loss of the first entry, which had no more rounds. If the two train
    on different data or models, or the first entry had more rounds, the loss must be better than a guess. An entry that
    used more processors than it was given is refused.
    """
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

    workers = {entry.label: entry.start(chunks, rounds) for entry in entries}
    try:
        for name, worker in workers.items():
            ask(name, worker.answer)
        samples = interleave({name: partial(ask, name, one.order) for name, one in workers.items()}, chunks, warm=False)
        ends = {name: ask(name, partial(_end, one)) for name, one in workers.items()}
    finally:
        for worker in workers.values():
            worker.close()
    for entry in entries:
        if use_problem := workers[entry.label].use.problem(entry.cores):
            problems.setdefault(entry.label, use_problem)
            ends[entry.label] = None
    rows = []
    for entry in entries:
        row = {"name": entry.label, "title": entry.label, "ours": entry.ours, "cores": entry.cores}
        row["processors"] = round(workers[entry.label].use.processors, 3)
        problem = problems.get(entry.label) or _training_problem(entry, entries[0], ends)
        rows.append(row | ({"problem": problem} if problem else ends[entry.label]))
    return samples, rows


def _end(worker: Process) -> Any:
    """Return a worker's loss and memory. It computes them only now that all have trained their last chunk."""
    worker.send(None)
    return worker.answer()


def _training_problem(entry: Entry, unit: Entry, ends: dict[str, Any]) -> str:
    """Return how training failed; empty if it worked."""
    if ends[unit.label] is None:
        return f"the unit {unit.label!r} failed"
    a, b = entry.workload, unit.workload
    is_comparable = (a.model, a.clients, a.cohort, a.epochs) == (b.model, b.clients, b.cohort, b.epochs)
    is_comparable &= not a.options and entry.longer >= unit.longer
    loss = ends[entry.label]["loss"]
    limit = LOSS_RATIO * ends[unit.label]["loss"] + 0.05 if is_comparable else math.log(CLASSES)
    return "" if loss <= limit else f"it did not train: loss {loss:.3g}, at most {limit:.3g} was expected"


def race(entries: Sequence[Entry], chunks: int, rounds: int) -> dict[str, Any]:
    """Return the rows of all entries with seconds and speed; the first entry is the unit of speed."""
    samples, rows = turns(entries, chunks, rounds)
    for row in (row for row in rows if not has_failed(row)):
        seconds, unit = (samples.seconds[name] for name in (row["name"], entries[0].label))
        row |= {"seconds": summary(seconds), "speed": ratios(unit, seconds)}
    return {"busy": round(samples.busy, 3), "rows": rows}
