"""Tables on the device that the Triton kernels read: the chunks, and the addresses of scattered tensors.

Both are small int64 tensors that never change. An entry is used only for the content that it was made for (the bytes
of a table; all addresses), so it cannot become stale. A table that was seen before is found by its identity, addresses
by their sum, and then all are compared.

A stream reads only tables that were uploaded on it, in order, so no call waits for the device. During the capture of a
CUDA graph an existing entry is used and kept forever, because the end of a graph's life is not known. A missing entry
is uploaded by the graph itself at every replay. Its pinned memory is reserved before, because a capture must not
allocate it.
"""

from __future__ import annotations

import struct
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import torch
import triton.language as tl
from torch import Tensor

from .constants import check_not_freed
from .triton_chunks import CHUNK, Operand
from .triton_staging import Staging
from .weak_tensors import WeakTensorMap

ENTRIES = 256  # largest number of entries of each cache; a step of a model uses about five
ALIGNMENT = 16  # bytes of a 128-bit access
LOW_BITS = b"\x0f" + bytes(7)  # the bits of a word that are 0 in a multiple of 16
DTYPES = {
    torch.float32: tl.constexpr(tl.float32),
    torch.float64: tl.constexpr(tl.float64),
    torch.float16: tl.constexpr(tl.float16),
    torch.bfloat16: tl.constexpr(tl.bfloat16),
}
RESERVE = 1 << 17  # int64 numbers of pinned memory for captures: 1 MB
_address = torch.Tensor.data_ptr


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

    operand: Operand  # its pointer is int64 [2, segments]: address, row stride in elements
    is_aligned: bool  # every row of every tensor starts at a multiple of 16 bytes


class Place(NamedTuple):
    """The device and the stream of a call."""

    device: torch.device
    stream: int  # address; 0 on the CPU
    is_capturing: bool  # the stream's calls are captured in a graph


def place_of(device: torch.device) -> Place:
    """Return the place of a call that is made now."""
    if device.type == "cpu":
        return Place(device, 0, False)
    index = torch.cuda.current_device() if device.index is None else device.index
    return Place(device, torch._C._cuda_getCurrentRawStream(index), torch.cuda.is_current_stream_capturing())


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


def upload(values: Tensor, place: Place) -> Tensor:
    """Copy `values` (int64, on the CPU) to the device, in the order of the stream."""
    if place.device.type == "cpu":
        return values
    if place.is_capturing:
        return _reserve.take(values).to(place.device, non_blocking=True)
    _reserve.prepare(RESERVE // 2)
    return values.pin_memory().to(place.device, non_blocking=True)


Entry = TypeVar("Entry", ChunkTable, Addresses)


class Cache(Generic[Entry]):
    """The most recently used entries, by key, device and stream. An entry serves only the content it was made for."""

    def __init__(self) -> None:
        self._entries: OrderedDict[tuple[Hashable, torch.device, int], tuple[Any, Entry]] = OrderedDict()
        self._captured_entries: dict[tuple[Hashable, torch.device], list[tuple[Any, Entry]]] = {}

    def get(self, key: Hashable, content: Any, place: Place, make: Callable[[], Entry]) -> Entry:
        """Return the entry with this content. Different contents should have different keys."""
        if place.is_capturing:
            return self._find_captured(key, content, place.device) or make()
        full_key = key, place.device, place.stream
        found = self._entries.get(full_key)
        if found is not None and found[0] == content:
            self._entries.move_to_end(full_key)
            return found[1]
        entry = make()
        self._entries[full_key] = content, entry
        if len(self._entries) > ENTRIES:
            self._entries.popitem(last=False)
        return entry

    def _find_captured(self, key: Hashable, content: Any, device: torch.device) -> Entry | None:
        """Return an entry that any stream uploaded before the capture: all streams are idle when a capture begins."""
        kept_entries = self._captured_entries.setdefault((key, device), [])
        entry = next((e for c, e in kept_entries if c == content), None)
        if entry is None:
            found = ((c, e) for (k, d, _), (c, e) in self._entries.items() if d == device and k == key)
            entry = next((e for c, e in found if c == content), None)
            if entry is not None:
                kept_entries.append((content, entry))
        return entry


_plans: Cache[ChunkTable] = Cache()
_addresses: Cache[Addresses] = Cache()
_known_plans: WeakTensorMap[dict[tuple[torch.device, int], ChunkTable]] = WeakTensorMap()
_staging = Staging()


def chunk_table_of(table: Tensor, place: Place) -> ChunkTable:
    """Return the plan of a table (int64 `[segments, 4]`, on the CPU), which must not change afterwards."""
    with _lock:
        if place.is_capturing:
            return _plan_of_content(table, place)
        known = _known_plans.get(table)
        if known is None:
            known = _known_plans.set(table, {})
        plan = known.get(place[:2])
        if plan is None:
            if len(known) >= ENTRIES:
                known.clear()
            plan = known[place[:2]] = _plan_of_content(table, place)
        return plan


def _plan_of_content(table: Tensor, place: Place) -> ChunkTable:
    content = table.numpy().tobytes()
    return _plans.get(content, content, place, lambda: _make_chunk_table(table, place))


def _make_chunk_table(table: Tensor, place: Place) -> ChunkTable:
    chunk = CHUNK.value
    counts = (table[:, 1] + (chunk - 1)) // chunk
    segment = torch.repeat_interleave(torch.arange(table.shape[0], device=table.device), counts)
    first = torch.cumsum(counts, 0) - counts
    begin = (torch.arange(segment.numel(), device=table.device) - first[segment]) * chunk
    content = upload(torch.cat([torch.stack([segment, begin], 1).flatten(), table.flatten()]), place)
    chunks, records = content.split([2 * segment.numel(), table.numel()])
    lengths = tuple(table[:, 1].tolist())
    return ChunkTable(len(lengths), segment.numel(), chunks, records, lengths, not bool((table[:, 0] % 16).any()))


def operand_of(tensors: Sequence[Tensor], plan: ChunkTable, rows: int, place: Place) -> tuple[Operand, bool]:
    """Return a list operand in the form that kernels take, and a flag that is true if it is aligned.

    The operand is one field, or one tensor per segment.
    """
    first = tensors[0]
    if len(tensors) == 1 and not (plan.segments == 1 and first.numel() == rows * plan.lengths[0]):
        return field_of(first, rows)
    content, dtype = addresses_of(tensors), first.dtype
    if rows > 1:
        content += [t.stride(0) if t.numel() else 0 for t in tensors]
    with _lock:
        addresses = _addresses.get(
            (sum(content), dtype), content, place, lambda: _make_addresses(content, len(tensors), dtype, place)
        )
    return addresses.operand, addresses.is_aligned


def addresses_of(tensors: Sequence[Tensor]) -> list[int]:
    """Return the addresses of tensors. Raises FreedError for a tensor with elements but without memory."""
    addresses = list(map(_address, tensors))
    if not all(addresses):
        check_not_freed(tensors)
    return addresses


def pack(numbers: list[int]) -> bytes:
    """Return numbers as the int64 words of a table."""
    return struct.pack(f"{len(numbers)}q", *numbers)


def are_aligned(words: bytes) -> bool:
    """Return True if all packed numbers are multiples of 16."""
    low_bits = int.from_bytes(LOW_BITS * (len(words) // len(LOW_BITS)), "little")
    return not int.from_bytes(words, "little") & low_bits


def _make_addresses(content: list[int], segments: int, dtype: torch.dtype, place: Place) -> Addresses:
    """Upload the addresses, and the row strides that follow them if there is more than one row."""
    strides = content[segments:] or [0] * segments
    lengths = [stride * dtype.itemsize for stride in strides]
    numbers = content[:segments] + strides
    if place.is_capturing:
        table = upload(torch.tensor(numbers, dtype=torch.int64, device="cpu"), place)
    else:
        table = torch.empty(2 * segments, dtype=torch.int64, device=place.device)
        upload_words(pack(numbers), table)
    return Addresses(
        Operand(table.view(2, segments), 0, DTYPES[dtype]), are_aligned(pack(content[:segments] + lengths))
    )


def upload_words(words: bytes, target: Tensor) -> None:
    """Write words into `target`, int64 on the device, in the order of the current stream. Not for captures."""
    if target.is_cuda:
        with _lock:
            _reserve.prepare(RESERVE // 2)
    _staging.upload(words, target)


def field_of(field: Tensor, rows: int) -> tuple[Operand, bool]:
    """Return a field in the form that kernels take, addressed at the segments' offsets, and True if it is aligned."""
    stride = field.stride(0) if rows > 1 else 0
    is_aligned = field.data_ptr() % ALIGNMENT == 0 and stride * field.element_size() % ALIGNMENT == 0
    return Operand(field, stride, DTYPES[field.dtype]), is_aligned
