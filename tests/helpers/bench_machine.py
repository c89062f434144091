"""A small machine for the tests of the benchmarks, and an invented record."""

from collections.abc import Callable
from typing import Any

import torch

from bench.timing import Machine


class Small(Machine):
    """A machine whose copy is small, with a cache of 4 KB. It may say that it has a GPU."""

    def __init__(self, device: torch.device | None = None, cuda: bool = False) -> None:
        self.device, self.cache_bytes, self.cuda = torch.device("cpu"), 4096, cuda
        self._source, self._target, self._sweep = torch.ones(1000), torch.zeros(1000), torch.ones(4096)
        self.num_captured = self.num_queued = 0

    def begin(self, body: Callable[[], object], cold: bool = False, queued: bool = False) -> Callable[[], float]:
        self.num_queued += queued
        cuda, self.cuda = self.cuda, False
        try:
            return super().begin(body, cold, queued)
        finally:
            self.cuda = cuda

    def wait(self) -> None: ...

    def capture(self, body: Callable[[], object]) -> Callable[[], object]:
        self.num_captured += 1
        body()
        return body

    def launches(self, body: Callable[[], object]) -> int:
        body()
        return 3


def record_of(kind: str, *cases: dict[str, Any], device: str = "cpu", **changes: Any) -> dict[str, Any]:
    """Return a record of made-up measurements."""
    environment = {
        "command": "python -m bench made-up", "date": "2031-02-03T00:00:00+00:00", "commit": "0123456789abcdef+changes",
        "machine": {"cpu": "a CPU", "cores": 2, "caches": {"L1": "32K"}, "memory_gib": 8, "gpus": ["a GPU"]},
        "versions": {"python": "3.11", "torch": "2.13"},
    }  # fmt: skip
    base = {"kind": f"fastsam.bench.{kind}/2", "device": device, "quick": False, "environment": environment}
    return base | {"added": [], "cases": list(cases), "left_out": []} | changes
