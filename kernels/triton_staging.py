"""Pinned host memory from which small tables are uploaded, and which is kept, because pinning takes longer than a copy.

A buffer is written again after the device has read it. The host waits only if it is `BUFFERS` uploads ahead of the
device.
"""

from __future__ import annotations

import ctypes
import threading
from collections import deque

import torch
from torch import Tensor

BUFFERS = 16  # per device and length
LENGTHS = 64  # numbers of bytes that have buffers; a model has two or three


class _Buffer:
    """Host memory for one upload at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory: Tensor | None = None
        self._end = torch.cuda.Event() if device.type == "cuda" else None  # end of the last upload

    def upload(self, data: bytes, target: Tensor) -> None:
        if self._end is not None:
            self._end.synchronize()
        # After an interrupt the device may still read this memory. Then torch keeps it until the device has read it.
        memory, self._memory = self._memory, None
        if memory is None:
            memory = torch.empty(len(data) // 8, dtype=torch.int64, device="cpu", pin_memory=self._end is not None)
        ctypes.memmove(memory.data_ptr(), data, len(data))
        target.copy_(memory, non_blocking=True)
        if self._end is not None:
            self._end.record(torch.cuda.current_stream(self._device))
        self._memory = memory


class Staging:
    """The buffers of all devices and lengths, used in turn."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._buffers: dict[tuple[torch.device, int], deque[_Buffer]] = {}

    def upload(self, data: bytes, target: Tensor) -> None:
        """Copy packed numbers to `target` (int64, contiguous), in the order of the current stream.

        Not for captures of graphs, whose replays would read the memory again.
        """
        key = target.device, len(data)
        with self._lock:
            buffers = self._buffers.get(key)
            if buffers is None:
                if len(self._buffers) >= LENGTHS:
                    self._buffers.clear()
                buffers = self._buffers[key] = deque(_Buffer(target.device) for _ in range(BUFFERS))
            buffers.rotate()
            buffers[0].upload(data, target)
