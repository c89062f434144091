"""What an algorithm costs beside FedAvg: of a local step, and of a round. Both train in this process and take turns.

A local step's cost is a marginal one: the time of a round with `LONG` local epochs less that of a round with one, over
the steps between. What a round costs besides (constants, states, uploads, sums, the server's step) is in neither side
of that difference, and in the round's.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from bench.fed import ours
from bench.fed.workload import BATCH, CLASSES, SAMPLES, Workload
from bench.timing import Summary, Usage, no_garbage_collection

UNIT = "fedavg"
ALGORITHMS = ("scaffold", "fedcm", "feddyn", "fedlesam", "fedlesam-s", "fedlesam-d")  # one back-propagation a step
# What protects clients, in FedAvg: its options. It costs nothing in a local step, so these have rounds alone.
PROTECTED: dict[str, tuple[tuple[str, Any], ...]] = {
    # Most are clipped; with epsilon; and it still trains.
    "fedavg, noise_multiplier": (("clip_update", 0.15), ("noise_multiplier", 0.5)),
}
EXECUTORS = ("sequential", "auto")
LONG = 5  # local epochs of a long round
LR = 0.05  # with the workload's, five epochs of so few clients diverge under SCAFFOLD
# Clients of the rounds whose difference is taken: short turns, but as many rows as a round has where they are stacked.
CLIENTS = {"mlp": 20, "cnn": 4}
ROUNDS = {"mlp": 5, "cnn": 1}  # of each run in a turn
# Of the MLP with noise: as many as it is made for at once, and turns for one of the others', for its cost is as small
# as what the machine adds.
BLOCK, OFTEN = 64, 4


@dataclass(frozen=True)
class Cost:
    """Seconds of an algorithm relative to FedAvg's. seconds: of one of its local steps; with step None where rounds
    alone are looked at.

    problem: why there is none of this.
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


@dataclass(frozen=True)
class Times:
    """Seconds: of a round, and of one of its local steps."""

    round: float
    step: float


Pairs = list[tuple[Times, Times]]  # of an algorithm, each with FedAvg's beside it


def measure(device: str, turns: int) -> Iterator[Costs]:
    """MLP and CNN, each on the plain executor with one thread and on the default one."""
    for model in CLIENTS:
        for executor in EXECUTORS:
            yield compare(model, executor, device, turns)


def compare(model: str, executor: str, device: str, turns: int) -> Costs:
    """All algorithms, one after the other."""
    before = Usage.now()
    costs = [against_unit(Workload(model, name, device=device, lr=LR), executor, turns) for name in ALGORITHMS]
    for label, options in PROTECTED.items():
        workload = Workload(model, UNIT, device=device, lr=LR, options=options)
        costs.append(replace(against_unit(workload, executor, turns), label=label, step=None, seconds=None))
    return Costs(f"{model.upper()}, {executor}", costs, Usage.now().others_since(before))


def against_unit(workload: Workload, executor: str, turns: int) -> Cost:
    """An algorithm beside FedAvg, each of which begins every other turn. The first turn is not counted."""
    plain, alone = replace(workload, algorithm=UNIT, options=()), bool(workload.options)
    noisy = "noise_multiplier" in dict(workload.options) and workload.model == "mlp"
    chunk, turns = (BLOCK, OFTEN * turns) if noisy else (ROUNDS[workload.model], turns)
    own, unit = (Runs(load, executor, turns + 1, chunk, alone) for load in (workload, plain))
    pairs: Pairs = []
    problem = None
    with no_garbage_collection():
        try:
            for turn in range(turns + 1):
                pairs.append(beside(own, unit, turn % 2 == 1))
        except RuntimeError as error:
            problem = str(error)
    ends = [own.close(), unit.close()]
    return cost(workload.algorithm, pairs[1:], problem or ends[0] or ends[1])


def beside(own: Runs, unit: Runs, first: bool) -> tuple[Times, Times]:
    """A turn of both: some rounds of each run, one after the other as in a run by itself, then of its like. first: who
    begins.

    Raises RuntimeError when a run has ended.
    """
    seconds: dict[Paused, float] = {}
    for pair in zip(own.all, unit.all, strict=True):
        for run in pair if first else pair[::-1]:
            seconds[run] = sum(run.round() for _ in range(own.chunk))
    return own.times(seconds), unit.times(seconds)


def cost(label: str, pairs: Pairs, problem: str | None) -> Cost:
    """Of an algorithm's turns, or its problem."""
    if problem is not None:
        return Cost(label, problem=problem)
    step = Summary.of_ratios((own.step for own, _ in pairs), (unit.step for _, unit in pairs))
    whole = Summary.of_ratios((own.round for own, _ in pairs), (unit.round for _, unit in pairs))
    return Cost(label, step, whole, Summary.of([own.step for own, _ in pairs]))


class Runs:
    """An algorithm's runs: of the workload as it is, and of two with fewer clients whose rounds differ in their local
    epochs alone.

    chunk: rounds of each in a turn. alone: the workload's own alone; a local step then counts as 1.
    """

    def __init__(self, workload: Workload, executor: str, turns: int, chunk: int, alone: bool = False) -> None:
        few = replace(workload, cohort=CLIENTS[workload.model])
        self.chunk = chunk
        # Local steps that the long round takes and the short one does not.
        self.steps = few.cohort * (SAMPLES // BATCH) * (LONG - 1)
        loads = (workload,) * 3 if alone else (workload, few, replace(few, epochs=LONG))
        known = {load: Paused(load, executor, turns * chunk) for load in dict.fromkeys(loads)}
        self.all = list(known.values())
        self.whole, self.short, self.long = (known[load] for load in loads)

    def times(self, seconds: Mapping[Paused, float]) -> Times:
        """Of the seconds of a turn's rounds."""
        whole, short, long = (seconds[run] / self.chunk for run in (self.whole, self.short, self.long))
        return Times(whole, 1.0 if self.long is self.short else (long - short) / self.steps)

    def close(self) -> str | None:
        """Ends the runs; says what is wrong with one of them."""
        problems = [problem for run in self.all if (problem := run.close()) is not None]
        return problems[0] if problems else None


class Paused:
    """A run in a thread of its own, which trains a round when it is told to and only then.

    Clock: CPU seconds of the process where one thread trains, for what else the machine does is then not in them; else
    the wall's.
    """

    def __init__(self, workload: Workload, executor: str, rounds: int) -> None:
        self.workload, self.executor, self.rounds = workload, executor, rounds
        alone = executor == "sequential" and workload.device == "cpu"
        self.clock: Callable[[], float] = time.process_time if alone else time.perf_counter
        self.seconds, self._since, self._done, self._leave = 0.0, 0.0, 0, False
        self.model: nn.Module | None = None
        self.error: BaseException | None = None
        self._go, self._told = threading.Semaphore(0), threading.Semaphore(0)
        self._thread = threading.Thread(target=self._train, daemon=True)
        self._thread.start()

    def round(self) -> float:
        """Seconds of one more round. Raises RuntimeError when the run has ended in an error."""
        if self.error is None:
            self._go.release()
            self._told.acquire()
        if self.error is not None:
            raise RuntimeError(f"{self.workload.algorithm}: {type(self.error).__name__}: {self.error}")
        return self.seconds

    def close(self) -> str | None:
        """Ends the run. One that has taken all its turns trains a last round, which is evaluated; says what is wrong
        with it, if anything is."""
        self._leave = self._done < self.rounds
        self._go.release()
        self._thread.join()
        if self.model is None:
            return None if self._leave else f"{self.workload.algorithm}: {self.error}"
        loss, guess = self.workload.loss_of(self.model), math.log(CLASSES)
        return None if loss <= guess else f"it did not train: loss {loss:.3g}, at most {guess:.3g} was expected"

    def _train(self) -> None:
        try:
            self._wait()
            self.model = ours.train(self.workload, self.rounds + 1, self._tick, self.executor)
        except BaseException as error:
            self.error = error
        self._told.release()

    def _tick(self) -> None:
        """After every round."""
        if self.workload.device == "cuda":
            torch.cuda.synchronize()
        self.seconds = self.clock() - self._since
        self._done += 1
        if self._done <= self.rounds:  # after the last one there is nothing to wait for
            self._told.release()
            self._wait()

    def _wait(self) -> None:
        self._go.acquire()
        if self._leave:
            raise RuntimeError("it was left in the middle")
        self._since = self.clock()
