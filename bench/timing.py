"""The clock of all benchmarks: samples of every contender are interleaved, so that a disturbance hits all of them.

On the CPU a sample is timed by the host's clock, on CUDA by events and by replays of graphs.
"""

from __future__ import annotations

import gc
import math
import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

T = TypeVar("T")

COPY_BYTES = {"cpu": 128 << 20, "cuda": 1 << 30}  # size of each of the two buffers: far beyond any cache
DEFAULT_CACHE = 32 << 20  # where the system does not say
ROTATION = 4  # sets of operands fill this number of last-level caches, so that each is out of the cache at its turn
READS = 2  # reads of a gigabyte, half a millisecond at 4 TB/s, during which the host launches the largest graph
MIN_ROUNDS = 3  # rounds, also if they take longer than they may


def summary(values: Sequence[float]) -> dict[str, float]:
    """Return median and quartiles. Raises ValueError (statistics.StatisticsError) without values."""
    q1, median, q3 = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [*values] * 3
    return {"median": median, "q1": q1, "q3": q3}


def ratios(numerators: Iterable[float], denominators: Iterable[float]) -> dict[str, float]:
    """Return the summary of ratios of samples of the same round: a disturbance of a whole round cancels."""
    return summary([a / b for a, b in zip(numerators, denominators, strict=True)])


@dataclass
class Rounds:
    """Samples by round.

    Attributes:
        copies: bandwidth of a large copy in bytes/s.
        seconds: seconds of each contender.
        busy: processors that other processes kept busy meanwhile, on average.
    """

    copies: list[float]
    seconds: dict[str, list[Any]]
    busy: float = 0.0

    @property
    def facts(self) -> dict[str, Any]:
        """Return the number of rounds, the copy's bandwidth, and the processors that others used."""
        copy = {"copy": summary(self.copies)} if self.copies else {}
        return {"rounds": max(map(len, self.seconds.values()), default=0), "busy": round(self.busy, 3), **copy}

    def figures(self, name: str, bytes_: float, rivals: Mapping[str, str] | None = None) -> dict[str, Any]:
        """Return a contender's seconds, its fraction of the floor (`bytes_` at the copy's bandwidth), and its time over
        the times of the `rivals` (title: sample) in the same rounds."""
        seconds = self.seconds[name]
        floors = [bytes_ / bandwidth for bandwidth in self.copies]
        result = {"seconds": summary(seconds), "fraction": ratios(floors, seconds)}
        known_rivals = {title: rival for title, rival in (rivals or {}).items() if rival in self.seconds}
        ratios_to = {title: ratios(seconds, self.seconds[rival]) for title, rival in known_rivals.items()}
        return result | ({"to": ratios_to} if ratios_to else {})


def interleave(
    samples: Mapping[str, Callable[[], T]], rounds: int, copy: Callable[[], float] | None = None,
    max_seconds: float = math.inf, warm: bool = True,
) -> Rounds:  # fmt: skip
    """Take a sample of every contender per round, beginning with another contender in each round.

    Args:
        samples: functions that take a sample, by contender.
        rounds (int): number of rounds.
        copy: sample of the copy's bandwidth, taken at the start of a round.
        max_seconds (float): seconds after which no round begins, except the first `MIN_ROUNDS`.
        warm (bool): take one sample of each before, which does not count.
    """
    result, names = Rounds([], {name: [] for name in samples}), list(samples)
    with no_garbage_collection():
        for name in names if warm else ():
            samples[name]()
        usage = Usage.current()
        for number in range(rounds):
            if number >= MIN_ROUNDS and time.perf_counter() - usage.wall > max_seconds:
                break
            if copy is not None:
                result.copies.append(copy())
            start = number % max(len(names), 1)
            for name in names[start:] + names[:start]:
                result.seconds[name].append(samples[name]())
        result.busy = Usage.current().others_since(usage)
    return result


class Machine:
    """One device: its cache, its copy bandwidth and its clock."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.cache_bytes = cache_bytes(device)
        self.cuda = device.type == "cuda"
        elements = COPY_BYTES[device.type] // 4
        self._source = torch.ones(elements, device=device)
        self._target = torch.zeros(elements, device=device)
        # Only read: the write-back of changed cache lines would add to the measured time.
        self._sweep = torch.ones(ROTATION * self.cache_bytes // 4, device=device)
        self._captures: torch.cuda.Stream | None = None
        self._refusal: str | None = None

    def begin(self, body: Callable[[], object], cold: bool = False, is_queued: bool = False) -> Callable[[], float]:
        """Run `body` and return a function that says, after `wait`, how many seconds it took.

        Args:
            cold (bool): read a multiple of the caches' size before.
            is_queued (bool): launch the body while the device is busy with something else. On an idle device the first
                event is over at once, and the launch is on the clock: for a graph ten microseconds or more.
        """
        for _ in range(READS if is_queued and self.cuda else 0):
            self._source.max()  # only read, as the sweep is
        if cold:
            self._sweep.max()
        if not self.cuda:
            start = time.perf_counter()
            body()
            seconds = time.perf_counter() - start
            return lambda: seconds
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        body()
        last.record()
        return lambda: first.elapsed_time(last) / 1e3

    def sample(self, body: Callable[[], object], cold: bool = False, is_queued: bool = False) -> float:
        """Return the seconds that `body` takes on the device; see `begin`."""
        sample = self.begin(body, cold, is_queued)
        self.wait()
        return sample()

    def copy_bandwidth(self) -> float:
        """Return the bytes per second of a large copy, read plus written."""
        seconds = self.sample(lambda: self._target.copy_(self._source), is_queued=True)
        return 2 * self._source.numel() * 4 / seconds

    def wait(self) -> None:
        """Return when the device has done its work."""
        if self.cuda:
            torch.cuda.synchronize(self.device)

    def capture(self, body: Callable[[], object]) -> Callable[[], object]:
        """Capture `body`, which has run before, as a CUDA graph and return its replay. Raises CaptureError, a
        RuntimeError. After one no other capture is tried, since the first may still hold torch's allocator."""
        from fastsam.fed.executors.cuda import CaptureError, Cuda

        if self._refusal is not None:
            raise CaptureError(f"not tried, because an earlier capture of this process failed: {self._refusal}")
        self.wait()
        cuda = Cuda(self.device)
        self._captures = self._captures or cuda.stream()
        try:
            graph = cuda.capture(body, self._captures)
        except CaptureError as error:
            self._refusal = str(error)
            raise
        graph.replay()
        self.wait()
        return graph.replay

    def launches(self, body: Callable[[], object]) -> int:
        """Count the kernels, copies and fills that `body` puts on the device, by torch's profiler."""
        from torch.profiler import ProfilerActivity, profile

        self.wait()
        with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiler:
            body()
            self.wait()
        on_device = [e for e in profiler.events() if e.device_type == torch.autograd.DeviceType.CUDA]
        return sum(not event.is_user_annotation for event in on_device)


def cache_bytes(device: torch.device) -> int:
    """Return the size of the last-level cache."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).L2_cache_size)
    texts = [path.read_text().strip() for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("*/size")]
    scales = {"K": 10, "M": 20, "G": 30}
    return max((int(t.rstrip("KMG")) << scales.get(t[-1:], 0) for t in texts), default=DEFAULT_CACHE)


@contextmanager
def intra_op_threads(number: int) -> Iterator[None]:
    """Set torch's number of threads inside the block."""
    old_number = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(old_number)


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Collect now, so that no collection comes while something is timed or counted."""
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
    process: float

    @classmethod
    def current(cls) -> Usage:
        """Return the usage so far."""
        stat, machine = Path("/proc/stat"), float("nan")
        if stat.exists():
            fields = list(map(int, stat.read_text().split("\n", 1)[0].split()[1:9]))
            machine = (sum(fields) - fields[3] - fields[4]) / os.sysconf("SC_CLK_TCK")  # without idle and wait
        return cls(time.perf_counter(), machine, time.process_time())

    def others_since(self, start: Usage) -> float:
        """Return the processors kept busy by others on average; NaN if the system does not say (no /proc/stat)."""
        seconds = (self.machine - start.machine) - (self.process - start.process)
        return max(seconds, 0.0) / max(self.wall - start.wall, 1e-9) if seconds == seconds else seconds
