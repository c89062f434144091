"""Cores of a contender: how many it is given, and how many processors it and its descendants use in its turns.

A process keeps to its cores by its CPU affinity, which all processes and threads that it starts inherit. Its use is
still measured, because a library may set an affinity itself.
"""

import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

TOLERANCE = 0.05  # part of the given cores that may be used in addition
CLOCK_ERROR = 0.02  # s of CPU time: two ticks, the resolution of ended children


def available() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


@contextmanager
def restrict(number: int | None) -> Iterator[None]:
    """Give processes that this thread starts in the block `number` cores, the last ones; None gives all.

    Raises ValueError if this process may use fewer cores.
    """
    old_cores = os.sched_getaffinity(0)
    if number is not None and not 1 <= number <= len(old_cores):
        raise ValueError(f"expected 1 to {len(old_cores)} cores, got {number}. This process may use no more cores")
    try:
        os.sched_setaffinity(0, old_cores if number is None else sorted(old_cores)[-number:])
        yield
    finally:
        os.sched_setaffinity(0, old_cores)


class Use:
    """The processors that a process and its descendants use in turns.

    Args:
        pid: id of the process.

    Attributes:
        cpu: seconds of CPU time in all turns.
        wall: seconds of all turns.
    """

    def __init__(self, pid: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self.pid, self.clock, self.cpu, self.wall = pid, clock, 0.0, 0.0

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Count the block as a turn."""
        cpu, wall = cpu_seconds(self.pid), self.clock()
        yield
        self.wall += self.clock() - wall
        self.cpu += max(cpu_seconds(self.pid) - cpu, 0.0)

    @property
    def processors(self) -> float:
        """Return the number of processors in use on average."""
        return self.cpu / max(self.wall, 1e-9)

    def problem(self, number: int) -> str:
        """Return the reason why this is no use of `number` cores; empty if it is."""
        if self.cpu <= (1 + TOLERANCE) * number * self.wall + CLOCK_ERROR:
            return ""
        return (
            f"it used {self.processors:.2f} processors, and {number} {'core was' if number == 1 else 'cores were'} "
            f"expected. Tell it how many cores it has"
        )


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process, of its descendants, and of their children that have ended."""
    children, ended = defaultdict[int, list[int]](list), dict[int, float]()
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()  # the name before may have blanks
        except OSError:  # it has ended
            continue
        children[int(fields[1])].append(int(path.parent.name))
        ended[int(path.parent.name)] = (int(fields[13]) + int(fields[14])) / os.sysconf("SC_CLK_TCK")
    seconds, queue = 0.0, [pid]
    while queue:
        process = queue.pop()
        queue += children[process]
        seconds += _own_seconds(process) + ended.get(process, 0.0)
    return seconds


def _own_seconds(pid: int) -> float:
    """Return the CPU time of a process in the kernel's resolution; 0 if it has ended."""
    try:
        return time.clock_gettime((~pid << 3) | 2)  # as clock_getcpuclockid(3) makes the clock's id
    except OSError:
        return 0.0
