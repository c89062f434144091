"""Times of steady rounds: five rounds are dropped, and ten rounds in a row follow in which nothing was prepared.

A round prepares if it captures a CUDA graph, records or compares a pass, or compiles. It is never reported. The rounds
before it were warm-up too, so the ten begin after it.

A steady round may still be slow, because the passes of stacked clients run through the model's Python code and not from
recordings. Then the figures have the number of such passes and the reason.
"""

import functools
import logging
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from statistics import median
from typing import Any
from unittest import mock

import torch

from fastsam.fed.executors.cuda import Cuda
from fastsam.fed.executors.record import Replays
from fastsam.fed.executors.stacked import StackedPasses

DROPPED, ROUNDS = 5, 10
MAX_ROUNDS = 10_000  # rounds of a training loop that `SteadyRounds` ends

Figures = dict[str, Any]
Tick = Callable[..., None]  # function that a training loop calls after every round


class Enough(Exception):
    """The end of a training loop, raised in the call after a round: all times are there, or the time is over."""


class SteadyRounds:
    """The function that a training loop calls after every round.

    Args:
        device: device of the training, which has to be done before a time is taken.
        num_preparations: function that returns how much was prepared so far.
        seconds (float): time after which the loop ends without all rounds.
        rounds (int): number of times to store.
        dropped (int): number of rounds before the first time.
        clock: function that returns seconds.
        slow_passes: counter of passes that are not replayed.

    Attributes:
        times: seconds of each steady round.
    """

    def __init__(
        self, device: str | torch.device, num_preparations: Callable[[], int], seconds: float = math.inf,
        rounds: int = ROUNDS, dropped: int = DROPPED, clock: Callable[[], float] = time.perf_counter,
        slow_passes: "SlowPasses | None" = None,
    ) -> None:  # fmt: skip
        self.device, self.num_preparations, self.seconds = torch.device(device), num_preparations, seconds
        self.rounds, self.dropped, self.clock = rounds, dropped, clock
        self.times, self.num_rounds, self.last_preparation = list[float](), 0, 0
        self.first: float | None = None
        self.slow_passes = slow_passes or SlowPasses()
        self._is_steady, self._num_slow = False, 0  # number of slow passes before the first steady round
        self._num_known = num_preparations()
        self._since = self._start = clock()

    def __call__(self, record: Any = None) -> None:
        """Note the end of a round. Raises Enough if it was the last one."""
        now = self._now()
        self.num_rounds += 1
        self.first = now - self._start if self.first is None else self.first
        if (number := self.num_preparations()) != self._num_known:
            self._num_known, self.last_preparation = number, self.num_rounds
            self._is_steady = False
            self.times.clear()
        elif self._is_steady:
            self.times.append(now - self._since)
        if len(self.times) == self.rounds or now - self._start > self.seconds:
            raise Enough
        if not self._is_steady and self.num_rounds >= self.dropped:
            self._is_steady, self._num_slow = True, self.slow_passes.count
        self._since = self._now()

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return self.clock()

    def figures(self) -> Figures:
        """Return the time of each steady round, their median, and the seconds of the first round. See `figures_of`.
        Passes of these rounds that are not replayed are counted, and the row has a note with the reason."""
        result = {"first": self.first} | figures_of(self.times, self.rounds, self.num_rounds, self.last_preparation)
        count = self.slow_passes.count - self._num_slow if self.times else 0
        if not count:
            return result
        count_a_round, reasons = count / len(self.times), self.slow_passes.reasons
        notes = [result.get("note"), f"{count_a_round:g} passes a round are not replayed", *reasons]
        return result | {"slow_passes": count_a_round, "note": ": ".join(filter(None, notes))}


class SlowPasses(logging.Handler):
    """A counter of passes of stacked clients that run through the model's Python code.

    Attributes:
        count: number of passes.
        reasons: warnings of the executor that say why.
    """

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.count, self.reasons = 0, list[str]()

    def emit(self, record: logging.LogRecord) -> None:
        """Store a warning of an executor."""
        if record.getMessage().startswith("executor "):
            self.reasons.append(record.getMessage())

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count the passes inside."""
        run, log = StackedPasses.gradients, logging.getLogger("fastsam.fed")

        @functools.wraps(run)
        def counted(passes: StackedPasses, *operands: Any, **options: Any) -> Any:
            self.count += 1
            return run(passes, *operands, **options)

        log.addHandler(self)
        try:
            with mock.patch.object(StackedPasses, "gradients", counted):
                yield
        finally:
            log.removeHandler(self)


def figures_of(times: Sequence[float], rounds: int, num_rounds: int, last_preparation: int = 0) -> Figures:
    """Return the times of steady rounds and their median in seconds.

    A row with fewer times than `rounds` has a note. A row without times has a reason, which names the number of all
    rounds and the last round that prepared something (0 for none).
    """
    if not times:
        prepared = f", the last one that captured or recorded is {last_preparation}" if last_preparation else ""
        return {"rounds": num_rounds, "absent": f"no time left: no steady round among {num_rounds}{prepared}"}
    result: Figures = {"rounds": num_rounds, "seconds": median(times), "times": list(times)}
    note = {"note": f"{len(times)} of {rounds} rounds"} if len(times) < rounds else {}
    return result | note


def measure(device: str | torch.device, train: Callable[[Tick], Any], seconds: float, **options: Any) -> SteadyRounds:
    """Return the steady rounds of `train`, which calls its argument after every round. See `SteadyRounds`."""
    slow_passes = SlowPasses()
    with count_preparations() as num_preparations, slow_passes.counting():
        rounds = SteadyRounds(device, num_preparations, seconds, slow_passes=slow_passes, **options)
        with suppress(Enough):
            train(rounds)
    return rounds


@contextmanager
def count_preparations() -> Iterator[Callable[[], int]]:
    """Yield a function that returns the number of captures, recordings and compilations in this context."""
    num_calls = 0

    def count(work: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(work)
        def wrapper(*args: Any, **keywords: Any) -> Any:
            nonlocal num_calls
            num_calls += 1
            return work(*args, **keywords)

        return wrapper

    with ExitStack() as stack:
        # All captures go through the first. The others are Python's passes next to a replayed pass.
        for owner, name in ((Cuda, "capture"), (Replays, "_record"), (Replays, "_compared")):
            stack.enter_context(mock.patch.object(owner, name, count(getattr(owner, name))))
        yield lambda: num_calls + _num_compilations()


def _num_compilations() -> int:
    """Return how many frames torch.compile has compiled in this process."""
    dynamo = sys.modules.get("torch._dynamo.utils")  # its import takes a second
    return 0 if dynamo is None else int(dynamo.counters["frames"]["total"])
