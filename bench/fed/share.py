"""How much of a CNN round is the loop's own: outside autograd (forward, backward) and outside the kernels (also that of
the sums).

Strictly: the loop's are also the gathers of batches, the copies of the global weights into a client's row, and the
server's step, which torch's own operations do and any loop has.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from statistics import median
from typing import Any

from bench.fed import ours
from bench.fed.workload import Workload
from fastsam.fed.executors.gradient_passes import Passes
from fastsam.fed.executors.kernel_calls import Form
from fastsam.fed.sums.fixed_point import FixedPointSum

INSIDE: tuple[tuple[Any, str], ...] = ((Passes, "run"), (Form, "perturb_"), (Form, "update_"), (FixedPointSum, "add_"))


def measure(rounds: int) -> dict[str, float]:
    """Return medians: seconds of a round, and the share that is the loop's own (sampling, tasks, batches, aggregation,
    the server's step, records)."""
    ticks: list[float] = []
    with _timed() as spent:
        inside: list[float] = []

        def tick() -> None:
            ticks.append(time.perf_counter())
            inside.append(spent())

        ours.train(Workload("cnn"), rounds + 1, tick, "sequential")
    whole, within = ([after - before for before, after in pairwise(marks)] for marks in (ticks, inside))
    # the first round, before the first tick, warms up
    shares = [1 - part / seconds for part, seconds in zip(within, whole)]
    return {"seconds": median(whole), "own_share": median(shares)}


@contextmanager
def _timed() -> Iterator[Callable[[], float]]:
    """Adds up the time inside autograd and the kernels, while it lasts."""
    total = [0.0]

    def timed(work: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **keywords: Any) -> Any:
            since = time.perf_counter()
            try:
                return work(*args, **keywords)
            finally:
                total[0] += time.perf_counter() - since

        return wrapped

    originals = [(owner, name, getattr(owner, name)) for owner, name in INSIDE]
    for owner, name, work in originals:
        setattr(owner, name, timed(work))
    try:
        yield lambda: total[0]
    finally:
        for owner, name, work in originals:
            setattr(owner, name, work)
