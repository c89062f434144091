"""Pinned host memory from which small tables are uploaded, and which is kept, because pinning takes longer than a copy.

A buffer is written again after the device has read it. The host waits only if it is `BUFFERS` uploads ahead of the
device.
"""

from __future__ import annotations

import ctypes
import threading

import torch
from torch import Tensor

BUFFERS = 16  # per device


class _Buffer:
    """Host memory for one upload at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory: Tensor | None = None
        self._end = torch.cuda.Event() if device.type == "cuda" else None  # end of the last upload

    def upload(self, numbers: list[int], target: Tensor) -> None:
        if self._end is not None:
            self._end.synchronize()
        # After an interrupt the device may still read this memory. Then torch keeps it until the device has read it.
        memory, self._memory = self._memory, None
        count = len(numbers)
        if memory is None or memory.numel() < count:
            memory = torch.empty(2 * count, dtype=torch.int64, device="cpu", pin_memory=self._end is not None)
        (ctypes.c_int64 * count).from_address(memory.data_ptr())[:] = numbers
        target.copy_(memory[:count], non_blocking=True)
        if self._end is not None:
            self._end.record(torch.cuda.current_stream(self._device))
        self._memory = memory


class Staging:
    """The buffers of all devices, used in turn."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._buffers: dict[torch.device, list[_Buffer]] = {}
        self._turn = 0

    def upload(self, numbers: list[int], target: Tensor) -> Tensor:
        """Copy `numbers` to `target` (int64, contiguous), in the order of the current stream, and return `target`.

        Not for captures of graphs, whose replays would read the memory again.
        """
        with self._lock:
            if target.device not in self._buffers:
                self._buffers[target.device] = [_Buffer(target.device) for _ in range(BUFFERS)]
            self._turn = (self._turn + 1) % BUFFERS
            self._buffers[target.device][self._turn].upload(numbers, target)
        return target
