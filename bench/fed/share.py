"""The loop's share of a CNN round: time outside autograd (forward, backward) and outside all kernels.

The share is strict. It includes the gathers of batches, the copies of the global weights into a client's row, and the
server's step. Torch operations do these, and any loop has them.
"""

import functools
import time
from collections.abc import Callable
from contextlib import ExitStack
from itertools import pairwise
from statistics import median
from typing import Any
from unittest import mock

from bench.fed import ours
from bench.fed.workload import Workload
from fastsam.fed.executors.gradient_passes import Passes
from fastsam.fed.executors.local_rows import LocalRows
from fastsam.fed.sums.fixed_point import FixedPointSum

INSIDE: tuple[tuple[Any, str], ...] = (
    (Passes, "run"),
    (LocalRows, "perturb"),
    (LocalRows, "update"),
    (FixedPointSum, "add_"),
)


def measure(load: Workload, rounds: int) -> dict[str, float]:
    """Return medians: seconds of a round, and the share outside of `INSIDE` (sampling, batches, sums, records)."""
    seconds_inside, marks = 0.0, list[tuple[float, float]]()

    def time_calls(work: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(work)
        def wrapper(*args: Any, **keywords: Any) -> Any:
            nonlocal seconds_inside
            start = time.perf_counter()
            try:
                return work(*args, **keywords)
            finally:
                seconds_inside += time.perf_counter() - start

        return wrapper

    with ExitStack() as stack:
        for owner, name in INSIDE:
            stack.enter_context(mock.patch.object(owner, name, time_calls(getattr(owner, name))))
        ours.train(load, rounds + 1, lambda: marks.append((time.perf_counter(), seconds_inside)), "sequential")
    # the first round, before the first tick, warms up
    pairs = [(end[0] - start[0], end[1] - start[1]) for start, end in pairwise(marks)]
    own_share = median(1 - part / total for total, part in pairs)
    return {"seconds": median(total for total, _ in pairs), "own_share": own_share}
