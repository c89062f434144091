"""Interleaved timing: every round takes one sample of every contender and of a large copy, so that what disturbs one
disturbs all."""

from __future__ import annotations

import gc
import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

from bench.contenders import Stepper
from bench.problem import Gradients

COPY_ELEMENTS = 32 << 20  # float32: 128 MiB to 128 MiB, far beyond any cache


class Clock:
    """`time.perf_counter` with the time that `hide` was told of taken out."""

    def __init__(self) -> None:
        self.hidden = 0.0

    def __call__(self) -> float:
        return time.perf_counter() - self.hidden

    def hide(self, since: float) -> None:
        """Takes out the time from `since` (of `time.perf_counter`) until now."""
        self.hidden += time.perf_counter() - since


@dataclass
class Drive:
    """Takes steps with one contender; handing over the gradients is not on the clock."""

    stepper: Stepper
    gradients: Gradients
    clock: Clock
    passes: int = 0

    def step(self) -> None:
        self._backward()
        self.stepper.first()
        self._backward()
        self.stepper.second()

    def _backward(self) -> None:
        since = time.perf_counter()
        self.stepper.take(self.gradients, self.passes)
        self.passes += 1
        self.clock.hide(since)

    def sample(self, steps: int) -> float:
        """Seconds per step; where a sample is several steps, the first one refills the caches and is not counted."""
        if steps > 1:
            self.step()
        start = self.clock()
        for _ in range(steps):
            self.step()
        return (self.clock() - start) / steps


@dataclass
class Copy:
    """A large copy: its bytes (read and written) over its time are the bandwidth that the floor is reckoned with."""

    source: torch.Tensor = field(default_factory=lambda: torch.ones(COPY_ELEMENTS))
    target: torch.Tensor = field(default_factory=lambda: torch.zeros(COPY_ELEMENTS))

    def sample(self) -> float:
        """Bytes per second."""
        start = time.perf_counter()
        self.target.copy_(self.source)
        return 2 * self.source.numel() * self.source.element_size() / (time.perf_counter() - start)


@dataclass(frozen=True)
class Summary:
    """Median and quartiles."""

    median: float
    q1: float
    q3: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Summary:
        """Raises ValueError (statistics.StatisticsError) without values."""
        if len(values) == 1:
            return cls(values[0], values[0], values[0])
        q1, median, q3 = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, q1, q3)

    @classmethod
    def of_ratios(cls, numerators: Iterable[float], denominators: Iterable[float]) -> Summary:
        """Of the ratios of samples of the same round: a disturbance that lasts a round leaves them alone."""
        return cls.of([a / b for a, b in zip(numerators, denominators, strict=True)])


@dataclass
class Rounds:
    """Per round, the bandwidth of a large copy (bytes/s) and each contender's seconds per step."""

    copy: list[float]
    seconds: dict[str, list[float]]
    others: float  # processors' worth of time that other processes used meanwhile


def measure(drives: dict[str, Drive], steps: int, rounds: int, tick: Callable[[], None] = lambda: None) -> Rounds:
    """`rounds` interleaved rounds; each begins with another contender, so that nobody always follows the same
    neighbour."""
    copy = Copy()
    copy.sample()
    for drive in drives.values():
        drive.sample(steps)
    taken = Rounds([], {name: [] for name in drives}, 0.0)
    names = list(drives)
    with no_garbage_collection():
        before = Usage.now()
        for i in range(rounds):
            taken.copy.append(copy.sample())
            start = i % max(len(names), 1)
            for name in names[start:] + names[:start]:
                taken.seconds[name].append(drives[name].sample(steps))
            tick()
        taken.others = Usage.now().others_since(before)
    return taken


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Collects now, so that no collection comes while something is timed or counted."""
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@dataclass(frozen=True)
class Usage:
    """Processor seconds since boot: of everything on the machine, and of this process."""

    wall: float
    machine: float
    own: float

    @classmethod
    def now(cls) -> Usage:
        return cls(time.perf_counter(), _busy_seconds(), time.process_time())

    def others_since(self, before: Usage) -> float:
        """Processors kept busy by others on average; NaN where the system does not say (no /proc/stat)."""
        others = (self.machine - before.machine) - (self.own - before.own)
        return max(others, 0.0) / max(self.wall - before.wall, 1e-9) if others == others else others


def _busy_seconds() -> float:
    stat = Path("/proc/stat")
    if not stat.exists():
        return float("nan")
    user, nice, system, _idle, _wait, irq, softirq, steal = map(int, stat.read_text().split("\n", 1)[0].split()[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
