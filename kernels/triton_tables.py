"""Tables on the device that the Triton kernels read: the chunks, and the addresses of scattered tensors.

Both are small int64 tensors that never change. They are cached by content (the bytes of a table; a tuple of addresses).
So an entry cannot become stale: tensors at different addresses have a different entry.

A stream reads only tables that were uploaded on it, in order, so no call waits for the device. During the capture of a
CUDA graph an existing entry is used and kept forever, because the end of a graph's life is not known. A missing entry
is uploaded by the graph itself at every replay. Its pinned memory is reserved before, because a capture must not
allocate it.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
import triton.language as tl
from torch import Tensor

from .constants import check_not_freed
from .triton_chunks import CHUNK, Operand

ENTRIES = 256  # largest number of entries of each cache; a step of a model uses about five
ALIGNMENT = 16  # bytes of a 128-bit access
DTYPES = {
    torch.float32: tl.constexpr(tl.float32),
    torch.float64: tl.constexpr(tl.float64),
    torch.float16: tl.constexpr(tl.float16),
    torch.bfloat16: tl.constexpr(tl.bfloat16),
}
RESERVE = 1 << 17  # int64 numbers of pinned memory for captures: 1 MB


@dataclass(frozen=True)
class ChunkTable:
    """The cut of a table into chunks, on the device."""

    segments: int
    n_chunks: int
    chunks: Tensor  # int64 [n_chunks, 2]: segment, first element in it
    table: Tensor  # int64 [segments, 4]
    lengths: tuple[int, ...]
    is_aligned: bool  # every segment starts at a multiple of 16 elements


@dataclass(frozen=True)
class Addresses:
    """The addresses of the tensors of a list operand, on the device."""

    table: Tensor  # int64 [2, segments]: address, row stride in elements
    is_aligned: bool  # every row of every tensor starts at a multiple of 16 bytes


_lock = threading.RLock()  # several threads may train clients at once


class Reserve:
    """Pinned host memory for uploads inside graph captures. It is never reused, because every replay reads it again."""

    def __init__(self) -> None:
        self._memory: Tensor | None = None
        self._offset = 0
        self._full: list[Tensor] = []

    def prepare(self, numbers: int) -> None:
        """Reserve room for this many numbers. Called outside captures."""
        if self._memory is None or self._offset + numbers > self._memory.numel():
            if self._memory is not None:
                self._full.append(self._memory)
            self._memory = torch.empty(max(numbers, RESERVE), dtype=torch.int64, device="cpu", pin_memory=True)
            self._offset = 0

    def take(self, values: Tensor) -> Tensor:
        """Return a pinned copy of `values` that stays allocated."""
        self.prepare(values.numel())
        assert self._memory is not None
        view = self._memory[self._offset : self._offset + values.numel()].view(values.shape)
        self._offset += values.numel()
        return view.copy_(values)


_reserve = Reserve()


def upload(values: Tensor, device: torch.device) -> Tensor:
    """Copy `values` (int64, on the CPU) to `device`, in the order of the current stream."""
    if device.type == "cpu":
        return values
    if torch.cuda.is_current_stream_capturing():
        return _reserve.take(values).to(device, non_blocking=True)
    _reserve.prepare(RESERVE // 2)
    return values.pin_memory().to(device, non_blocking=True)


Entry = TypeVar("Entry", ChunkTable, Addresses)


class Cache(Generic[Entry]):
    """The most recently used entries, by content, device and stream."""

    def __init__(self) -> None:
        self._entries: OrderedDict[tuple[Hashable, torch.device, int], Entry] = OrderedDict()
        self._captured_entries: dict[tuple[Hashable, torch.device], Entry] = {}

    def get(self, content: Hashable, device: torch.device, make: Callable[[], Entry]) -> Entry:
        with _lock:
            return self._get(content, device, make)

    def _get(self, content: Hashable, device: torch.device, make: Callable[[], Entry]) -> Entry:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return self._find_captured(content, device) or make()
        key = (content, device, torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0)
        entry = self._entries.get(key)
        if entry is None:
            entry = self._entries[key] = make()
            if len(self._entries) > ENTRIES:
                self._entries.popitem(last=False)
        else:
            self._entries.move_to_end(key)
        return entry

    def _find_captured(self, content: Hashable, device: torch.device) -> Entry | None:
        """Return an entry that any stream uploaded before the capture: all streams are idle when a capture begins."""
        entry = self._captured_entries.get((content, device))
        if entry is None:
            entry = next((e for (c, d, _), e in self._entries.items() if d == device and c == content), None)
            if entry is not None:
                self._captured_entries[content, device] = entry
        return entry


_plans: Cache[ChunkTable] = Cache()
_addresses: Cache[Addresses] = Cache()


def chunk_table_of(table: Tensor, device: torch.device) -> ChunkTable:
    """Return the plan of a table (int64 `[segments, 4]`, on the CPU)."""
    return _plans.get(table.numpy().tobytes(), device, lambda: _make_chunk_table(table, device))


def _make_chunk_table(table: Tensor, device: torch.device) -> ChunkTable:
    chunk = CHUNK.value
    counts = (table[:, 1] + (chunk - 1)) // chunk
    segment = torch.repeat_interleave(torch.arange(table.shape[0], device=table.device), counts)
    first = torch.cumsum(counts, 0) - counts
    begin = (torch.arange(segment.numel(), device=table.device) - first[segment]) * chunk
    content = upload(torch.cat([torch.stack([segment, begin], 1).flatten(), table.flatten()]), device)
    chunks, records = content.split([2 * segment.numel(), table.numel()])
    lengths = tuple(table[:, 1].tolist())
    return ChunkTable(len(lengths), segment.numel(), chunks, records, lengths, not bool((table[:, 0] % 16).any()))


def operand_of(tensors: Sequence[Tensor], plan: ChunkTable, rows: int) -> tuple[Operand, bool]:
    """Return a list operand in the form that kernels take, and a flag that is true if it is aligned.

    The operand is one field, or one tensor per segment.
    """
    first = tensors[0]
    if len(tensors) == 1 and not (plan.segments == 1 and first.numel() == rows * plan.lengths[0]):
        return field_of(first, rows)
    strides = (0,) * len(tensors) if rows == 1 else tuple(t.stride(0) if t.numel() else 0 for t in tensors)
    pointers = tuple(t.data_ptr() for t in tensors)
    if not all(pointers):
        check_not_freed(tensors)
    content = (pointers, strides, first.element_size())
    addresses = _addresses.get(content, first.device, lambda: _make_addresses(*content, first.device))
    return Operand(addresses.table, 0, DTYPES[first.dtype]), addresses.is_aligned


def _make_addresses(
    pointers: tuple[int, ...], strides: tuple[int, ...], itemsize: int, device: torch.device
) -> Addresses:
    is_aligned = all(p % ALIGNMENT == 0 for p in pointers) and all(s * itemsize % ALIGNMENT == 0 for s in strides)
    return Addresses(upload(torch.tensor([pointers, strides], dtype=torch.int64, device="cpu"), device), is_aligned)


def field_of(field: Tensor, rows: int) -> tuple[Operand, bool]:
    """Return a field in the form that kernels take, addressed at the segments' offsets, and True if it is aligned."""
    stride = field.stride(0) if rows > 1 else 0
    is_aligned = field.data_ptr() % ALIGNMENT == 0 and stride * field.element_size() % ALIGNMENT == 0
    return Operand(field, stride, DTYPES[field.dtype]), is_aligned
