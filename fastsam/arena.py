"""The flat index space: the place of each tensor in a row, and the fields `[rows, row_size]` of the state.

A `Layout` has the place of each tensor's elements; an `Arena` allocates fields over it. The user's parameters are never
moved: they are flat only by index (a table of segments), and the optimizer's state is really flat.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

SEGMENT_ALIGNMENT = 16  # elements: 128-bit accesses for every dtype; with less, Triton falls back to 32-bit loads
KEPT = 256  # tables of some segments that a layout keeps
ROW_ALIGNMENT = 256  # bytes: cuBLASLt picks algorithms by pointer alignment, so rows must not differ in it


def is_dense(tensor: Tensor) -> bool:
    """Return True if the elements fill one block of memory without gaps or overlaps, in any order of dimensions."""
    if tensor.is_contiguous():
        return True
    dense_stride = 1
    for stride, size in sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n != 1):
        if stride != dense_stride:
            return False
        dense_stride *= size
    return True


@dataclass(frozen=True)
class Segment:
    """One tensor's place in a row. Elements keep the tensor's own order in memory (`stride`)."""

    offset: int
    shape: torch.Size
    stride: tuple[int, ...]
    group: int

    @property
    def length(self) -> int:
        return self.shape.numel()


class Layout:
    """The place of each tensor of a list in a row.

    Segments start at multiples of 16 elements and rows at multiples of 256 bytes. The padding between them is zero and
    stays zero.
    """

    def __init__(self, segments: Sequence[Segment]) -> None:
        self.segments = tuple(segments)
        self._subtables: dict[tuple[int, ...], Tensor] = {}
        end = max((s.offset + s.length for s in segments), default=0)
        # 256 elements are 256 bytes or more in every dtype, so one row size serves all the fields of an arena.
        self.row_size = max(-(-end // ROW_ALIGNMENT) * ROW_ALIGNMENT, ROW_ALIGNMENT)

    @classmethod
    def from_tensors(cls, tensors: Sequence[Tensor], groups: Sequence[int] | None = None) -> Layout:
        """Return the layout of `tensors` (dense, in any order of dimensions). `groups[i]` is the parameter group of
        tensor i.

        Raises ValueError for a tensor that is not dense (it has gaps or overlaps).
        """
        segments, offset = [], 0
        for i, tensor in enumerate(tensors):
            if not is_dense(tensor):
                raise ValueError(
                    f"tensor {i} of shape {tuple(tensor.shape)} has strides {tensor.stride()}: its elements do not "
                    "fill one block of memory, so they cannot be a segment; pass tensor.contiguous()"
                )
            segments.append(Segment(offset, tensor.shape, tensor.stride(), 0 if groups is None else groups[i]))
            offset += -(-tensor.numel() // SEGMENT_ALIGNMENT) * SEGMENT_ALIGNMENT
        return cls(segments)

    @property
    def numel(self) -> int:
        """Number of elements without the padding."""
        return sum(s.length for s in self.segments)

    @cached_property
    def table(self) -> Tensor:
        """int64 `[segments, 4]` on the CPU: offset, length, group, slot (the form in which ops take a layout)."""
        return self.subtable(tuple(range(len(self.segments))))

    def subtable(self, slots: tuple[int, ...]) -> Tensor:
        """Return the table of some of the segments, for a call that leaves the others untouched. It is kept."""
        subtable = self._subtables.get(slots)
        if subtable is None:
            if len(self._subtables) == KEPT:
                self._subtables.clear()
            rows = [(self.segments[i].offset, self.segments[i].length, self.segments[i].group, i) for i in slots]
            subtable = self._subtables[slots] = torch.tensor(rows, dtype=torch.int64, device="cpu").reshape(-1, 4)
        return subtable

    def views(self, row: Tensor) -> list[Tensor]:
        """Return one view per segment of `row` (`[row_size]` or `[rows, row_size]`), with the shape and strides of its
        tensor."""
        lead, lead_stride = tuple(row.shape[:-1]), tuple(row.stride()[:-1])
        start = row.storage_offset()
        return [row.as_strided(lead + tuple(s.shape), lead_stride + s.stride, start + s.offset) for s in self.segments]

    def gather(self, tensors: Sequence[Tensor], out: Tensor) -> Tensor:
        """Copy `tensors` (one per segment) into the row `out` (`[row_size]`), converting the dtype, and return
        `out`."""
        for view, tensor in zip(self.views(out), tensors, strict=True):
            view.copy_(tensor)
        return out


class Arena:
    """Named fields `[rows, row_size]` over one layout, on one device. Fields are zero at first."""

    def __init__(self, layout: Layout, rows: int = 1, device: torch.device | str = "cpu") -> None:
        self.layout, self.rows, self.device = layout, rows, torch.device(device)
        self._fields: dict[str, Tensor] = {}

    def field(self, name: str, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the field `name`, allocated as zeros at the first call. Raises TypeError if it exists with a
        different dtype."""
        tensor = self._fields.get(name)
        if tensor is None:
            tensor = self._fields[name] = torch.zeros(self.rows, self.layout.row_size, dtype=dtype, device=self.device)
        elif tensor.dtype != dtype:
            raise TypeError(f"field {name!r} holds {tensor.dtype}, requested as {dtype}; use another name")
        return tensor

    @property
    def names(self) -> tuple[str, ...]:
        """The fields there are."""
        return tuple(self._fields)

    def __contains__(self, name: str) -> bool:
        return name in self._fields

    def free(self, name: str) -> None:
        """Free a field's memory. Raises KeyError if there is no such field."""
        del self._fields[name]

    def views(self, name: str, row: int = 0) -> list[Tensor]:
        """Return the segments of one row of an existing field, shaped like their tensors."""
        return self.layout.views(self._fields[name][row])

    @property
    def nbytes(self) -> int:
        """Bytes of all fields."""
        return sum(f.numel() * f.element_size() for f in self._fields.values())
