"""The cost of an algorithm next to FedAvg: of a local step, and of a round. Both train in this process and take turns.

A local step's cost is a marginal cost: the time of a round with `LONG` local epochs less the time of a round with one,
over the steps between. The other costs of a round (constants, states, uploads, sums, the server's step) cancel in that
difference, and count in the round's.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from bench.fed import ours
from bench.fed.worker import Chunks
from bench.fed.workload import BATCH, CLASSES, SAMPLES, Workload
from bench.timing import Summary, Usage, interleave

UNIT = "fedavg"
ALGORITHMS = ("scaffold", "fedcm", "feddyn", "fedlesam", "fedlesam-s", "fedlesam-d")  # one back-propagation a step
# Options of FedAvg that protect clients. They cost nothing in a local step, so only rounds are compared.
PROTECTED: dict[str, tuple[tuple[str, Any], ...]] = {
    # Most are clipped; with epsilon; and it still trains.
    "fedavg, noise_multiplier": (("privacy", {"clip": 0.15, "noise_multiplier": 0.5}),),
}
EXECUTORS = ("sequential", "auto")
LONG = 5  # local epochs of a long round
LR = 0.05  # with the workload's, five epochs of so few clients diverge under SCAFFOLD
# Clients of the rounds whose difference is taken: short turns, but as many rows as a round has where they are stacked.
CLIENTS = {"mlp": 20, "cnn": 4}
ROUNDS = {"mlp": 5, "cnn": 1}  # of each run in a turn
# Rounds and turns of the MLP with noise: noise is drawn for 64 rounds at once, and its cost is as small as the
# machine's disturbances.
BLOCK, OFTEN = 64, 4


@dataclass(frozen=True)
class Cost:
    """Seconds of an algorithm relative to FedAvg's.

    step: ratio of local steps; None if only rounds are compared. seconds: duration of one local step. problem: reason
    why nothing was measured.
    """

    label: str
    step: Summary | None = None
    round: Summary | None = None
    seconds: Summary | None = None
    problem: str | None = None


@dataclass(frozen=True)
class Costs:
    """One model on one executor. busy: processors' worth of time that other processes used meanwhile."""

    title: str
    costs: list[Cost]
    busy: float

    @property
    def figures(self) -> list[Cost]:
        return self.costs


def measure(turns: int) -> Iterator[Costs]:
    """MLP and CNN, each on the plain executor with one thread and on the default one."""
    for model in CLIENTS:
        for executor in EXECUTORS:
            before = Usage.now()
            loads = {name: Workload(model, name, lr=LR) for name in ALGORITHMS}
            loads |= {n: Workload(model, UNIT, lr=LR, options=o) for n, o in PROTECTED.items()}
            costs = [compare(label, load, executor, turns) for label, load in loads.items()]
            yield Costs(f"{model.upper()}, {executor}", costs, Usage.now().others_since(before))


def compare(label: str, load: Workload, executor: str, turns: int) -> Cost:
    """Return the cost of an algorithm, whose runs take turns with FedAvg's. The first turn is not counted."""
    noisy = "privacy" in dict(load.options) and load.model == "mlp"
    chunk, turns = (BLOCK, OFTEN * turns) if noisy else (ROUNDS[load.model], turns)
    few = {"cohort": CLIENTS[load.model]}
    short = "round" if load.cohort == few["cohort"] else "short"
    lengths = {"round": {}} if load.options else {"round": {}, short: few, "long": few | {"epochs": LONG}}
    runs = {
        f"{who} {name}": Run(replace(one, **changed), executor, chunk, turns + 1)
        for name, changed in lengths.items()
        for who, one in (("own", load), ("unit", replace(load, algorithm=UNIT, options=())))
    }
    problem = None
    try:
        taken = interleave({name: run.sample for name, run in runs.items()}, turns).seconds
    except RuntimeError as error:
        problem = str(error)
    problem = next(filter(None, [problem, *[run.close() for run in runs.values()]]), None)
    if problem is not None:
        return Cost(label, problem=problem)
    whole = Summary.of_ratios(taken["own round"], taken["unit round"])
    if load.options:
        return Cost(label, round=whole)
    own, unit = (
        [long - short for long, short in zip(taken[f"{who} long"], taken[f"{who} {short}"], strict=True)]
        for who in ("own", "unit")
    )
    steps = CLIENTS[load.model] * (SAMPLES // BATCH) * (LONG - 1)
    return Cost(label, Summary.of_ratios(own, unit), whole, Summary.of([seconds / steps for seconds in own]))


class Left(Exception):
    """A run was ended before its last turn."""


class Run:
    """A run in a thread, which trains one chunk of rounds per call of `sample`.

    Clock: CPU seconds of the process if one thread trains, because they leave out other processes; else wall time.
    """

    def __init__(self, load: Workload, executor: str, chunk: int, turns: int) -> None:
        self.load, self.executor, self.leave, self.seconds = load, executor, False, 0.0
        clock = time.process_time if executor == "sequential" else time.perf_counter
        self.chunks = Chunks(turns, chunk, self._say, self._wait, clock=clock)
        self.model: nn.Module | None = None
        self.error: BaseException | None = None
        self._go, self._told = threading.Semaphore(0), threading.Semaphore(0)
        self._thread = threading.Thread(target=self._train, daemon=True)
        self._thread.start()

    def sample(self) -> float:
        """Return the seconds of a round of one more chunk. Raises RuntimeError if the run has ended in an error."""
        if self.error is None:
            self._go.release()
            self._told.acquire()
        if self.error is not None:
            raise RuntimeError(f"{self.load.algorithm}: {type(self.error).__name__}: {self.error}")
        return self.seconds

    def close(self) -> str | None:
        """End the run, which may have turns left. Return what is wrong with it."""
        self.leave = True
        self._go.release()
        self._thread.join()
        if self.model is None:
            return None if isinstance(self.error, Left) else f"{self.load.algorithm}: {self.error}"
        loss, guess = self.load.loss_of(self.model), math.log(CLASSES)
        return None if loss <= guess else f"it did not train: loss {loss:.3g}, at most {guess:.3g} was expected"

    def _train(self) -> None:
        try:
            self._wait()
            self.chunks.since = self.chunks.clock()
            self.model = ours.train(self.load, self.chunks.total + 1, self.chunks.tick, self.executor)
        except BaseException as error:
            self.error = error
        self._told.release()

    def _say(self, seconds: float) -> None:
        self.seconds = seconds
        self._told.release()

    def _wait(self) -> None:
        self._go.acquire()
        if self.leave:
            raise Left
