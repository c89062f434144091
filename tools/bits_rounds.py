"""Timed rounds of `tools/bits.py --time`: 20 and 100 of 100 unequal clients, one by one and stacked."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from fastsam import fed
from tools.bits_fed import LOOPS

NAMES = (
    *("FedAvg", "FedSAM", "SCAFFOLD", "FedLESAM", "FedSpeed", "FedSWA"),
    *("FedSCAM", "MimeLite", "FedSMOO", "FedAdamW"),
)
SIZES = [8 + 37 * i % 50 for i in range(100)]  # 8 to 57 samples, in batches of 16
WARM_UP = 6  # rounds before the first measurement, in which shapes are recorded
ROUNDS = {"sequential": 1, "vmap": 5}  # rounds of 100 clients in a measurement


class PausedRun(fed.Callback):
    """A run in a thread, which trains only during a measurement. So all rounds are of one run, in its steady state."""

    def __init__(self, name: str, executor: str, cohort: int) -> None:
        self.rounds = ROUNDS[executor] * 100 // cohort
        self._run = partial(_run, name, executor, cohort, self)
        self._start, self._end = threading.Semaphore(0), threading.Semaphore(0)
        self._next_pause, self._is_stopped, self.error = WARM_UP, False, None
        self._thread = threading.Thread(target=self._train, daemon=True)
        self._thread.start()
        self._wait()

    def _train(self) -> None:
        torch.set_num_threads(1)
        try:
            self._run()
        except Exception as error:  # raised again in the thread that measures
            self.error = error
        self._end.release()

    def on_round(self, run: Any, record: Any) -> None:
        if run.round == self._next_pause:
            self._next_pause += self.rounds
            self._end.release()
            self._start.acquire()
            if self._is_stopped:
                raise fed.Stop("measured")

    def _wait(self) -> None:
        self._end.acquire()
        if self.error is not None:
            raise self.error

    def seconds(self) -> float:
        """Train some rounds and return the processor time of one of them."""
        start = time.process_time()
        self._start.release()
        self._wait()
        return (time.process_time() - start) / self.rounds

    def stop(self) -> None:
        """End the run."""
        self._is_stopped = True
        self._start.release()
        self._thread.join()


def _run(name: str, executor: str, cohort: int, callback: PausedRun) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    data = [(torch.randn(n, 64), torch.randint(10, (n,))) for n in SIZES]
    rounds = 100_000  # more than are measured
    fed.run(
        module, data, getattr(fed, name)(), rounds=rounds, participation=cohort / 100, sampler="fixed",
        executor=executor, eval_every=rounds, progress=False, callbacks=[callback],
    )  # fmt: skip


_current: dict[str, PausedRun] = {}  # the run that is measured, by the name of its case


def seconds_per_round(case: str, name: str, executor: str, cohort: int) -> float:
    """Return the processor time of a round. The first call for a case ends the run of the last case."""
    if case not in _current:
        for run in _current.values():
            run.stop()
        _current.clear()
        _current[case] = PausedRun(name, executor, cohort)
    return _current[case].seconds()


def timings() -> Iterator[tuple[str, Callable[[], float]]]:
    """Yield rounds, as functions that return processor seconds a round."""
    cases = [(name, executor, cohort) for name in NAMES for executor in ROUNDS for cohort in (20, 100)]
    for name, executor, cohort in [*cases, *((name, "sequential", 20) for name in LOOPS)]:
        case = f"{name}, {executor}, {cohort} clients"
        yield case, partial(seconds_per_round, case, name, executor, cohort)
