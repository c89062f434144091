"""How one sample of some calls is timed on a device: by the host's clock on the CPU, by events and by graph replays on
CUDA."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import torch

from bench.kernel_data import ROTATION

COPY_BYTES = {"cpu": 128 << 20, "cuda": 1 << 30}  # of each of the two buffers: far beyond any cache
DEFAULT_CACHE = 32 << 20  # where the system does not say
# of a gigabyte, before what is queued behind them: half a millisecond at 4 TB/s, in which the host launches the largest
# graph
READS = 2


class Machine:
    """One device: its cache, its copy bandwidth and its clock."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.cache_bytes = cache_bytes(device)
        self.cuda = device.type == "cuda"
        elements = COPY_BYTES[device.type] // 4
        self._source = torch.ones(elements, device=device)
        self._target = torch.zeros(elements, device=device)
        # Only read: a cache full of changed lines would be written back on the time of what is measured.
        self._sweep = torch.ones(ROTATION * self.cache_bytes // 4, device=device)
        self._captures: torch.cuda.Stream | None = None
        self._refused: str | None = None

    def begin(self, body: Callable[[], object], cold: bool = False, queued: bool = False) -> Callable[[], float]:
        """Runs `body`, where asked for with caches that hold nothing of it; returns what says, after `wait`, how many
        seconds it took: by events on the device's stream, elsewhere by the host's clock.

        queued: the body is launched while the device is still busy with something else. On an idle one the first event
        is over at once, and then the launch is on the clock, too: for a graph ten microseconds or more.
        """
        for _ in range(READS if queued and self.cuda else 0):
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

    def sample(self, body: Callable[[], object], cold: bool = False, queued: bool = False) -> float:
        """Seconds that `body` takes on the device; see `begin`."""
        taken = self.begin(body, cold, queued)
        self.wait()
        return taken()

    def copy_bandwidth(self) -> float:
        """Bytes per second of a large copy, read plus written."""
        seconds = self.sample(lambda: self._target.copy_(self._source), queued=True)
        return 2 * self._source.numel() * 4 / seconds

    def wait(self) -> None:
        """Returns when the device has done its work."""
        if self.cuda:
            torch.cuda.synchronize(self.device)

    def capture(self, body: Callable[[], object]) -> Callable[[], object]:
        """`body`, which has run before, as a CUDA graph; returns its replay. Raises CaptureError, a RuntimeError; after
        one no other capture is tried, since the first may still hold torch's allocator."""
        from fastsam.fed.executors.cuda import CaptureError, Cuda

        if self._refused is not None:
            raise CaptureError(f"not tried, because an earlier capture of this process failed: {self._refused}")
        self.wait()
        cuda = Cuda(self.device)
        self._captures = self._captures or cuda.stream()
        try:
            graph = cuda.capture(body, self._captures)
        except CaptureError as error:
            self._refused = str(error)
            raise
        graph.replay()
        self.wait()
        return graph.replay

    def launches(self, body: Callable[[], object]) -> int:
        """Kernels, copies and fills that `body` puts on the device, counted by torch's profiler."""
        from torch.profiler import ProfilerActivity, profile

        self.wait()
        with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiler:
            body()
            self.wait()
        on_device = [e for e in profiler.events() if e.device_type == torch.autograd.DeviceType.CUDA]
        return sum(not event.is_user_annotation for event in on_device)


def cache_bytes(device: torch.device) -> int:
    """Size of the last-level cache."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).L2_cache_size)
    sizes = [_bytes(path.read_text().strip()) for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("*/size")]
    return max(sizes, default=DEFAULT_CACHE)


def _bytes(text: str) -> int:
    return int(text.rstrip("KMG")) << {"K": 10, "M": 20, "G": 30}.get(text[-1:], 0)
