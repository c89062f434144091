"""The operands of a call as lists of tensors, one per row and segment, as torch's multi-tensor functions take them.

Creating a view costs a microsecond, a table of segments has dozens, and most operands are the same fields in every
step. So the parsed table and the views of a field are cached until the table or the field is deleted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from .weak_tensors import WeakTensorMap

Tensors = list[Tensor] | tuple[Tensor, ...]  # type of the arguments of torch's multi-tensor functions
Lists = list[list[Tensor] | None]
_JOINT_NUMEL = 2**17  # largest number of elements of joint rows, whose temporary tensors stay in the cache
Shapes = tuple[Sequence[tuple[int, ...]], Sequence[tuple[int, ...]]]  # shapes and strides of tensors


class TensorLists:
    """The parsed form of a table. Segments without an element are not in its lists."""

    def __init__(self, table: Tensor) -> None:
        records = table.tolist()
        self.segments = len(records)
        self._nonempty = [i for i, (_, length, _, _) in enumerate(records) if length]
        self._records = [records[i] for i in self._nonempty]
        self._flat: Shapes = ([(record[1],) for record in self._records], [(1,)] * len(self._records))
        self.longest = max((record[1] for record in self._records), default=0)  # elements of the longest segment
        self._elements = max(1, sum(record[1] for record in self._records))
        self._all_slots = [slot for _, _, _, slot in records]
        members: dict[int, list[int]] = {}
        for i, (_, _, group, _) in enumerate(self._records):
            members.setdefault(group, []).append(i)
        self._groups = list(members.items())
        self._views: WeakTensorMap[tuple[tuple[int, int, int], Shapes, list[Tensor]]] = WeakTensorMap()

    def lists(self, rows: int, *operands: Sequence[Tensor] | None) -> Lists:
        """Return for each operand its tensors, row by row; None stays None.

        Tensors of one row and segment have the same shape and memory order in all lists.
        """
        lists: Lists = [None if o is None else self._tensors_of(o, rows) for o in operands]
        count, given_lists = len(self._nonempty), [tensors for tensors in lists if tensors is not None]
        if len(given_lists) == len(lists) == 1:
            return lists
        forms = [([t.shape for t in tensors[:count]], [t.stride() for t in tensors[:count]]) for tensors in given_lists]
        common = forms[0] if forms else self._flat
        if any(form != common for form in forms):
            lists = [None if tensors is None else self._flatten(tensors) for tensors in lists]
            common = self._flat
        for i, operand in enumerate(operands):
            if operand is not None and lists[i] is None:
                lists[i] = self._views_of(operand[0], rows, common) if count else []
        return lists

    def parts(self, hparams: Tensor, lists: Lists, joins: bool = False) -> Iterator[tuple[int, list[float], list[Any]]]:
        """Yield each row and group: the row, the group's scalars as read on the host, its part of each list. With
        `joins` short rows with one group and equal scalars are one part, of row 0."""
        count, rows = len(self._nonempty), hparams.tolist()
        is_short = joins and len(rows) <= _JOINT_NUMEL // self._elements
        if is_short and len(self._groups) == 1 == len(rows[0]) and rows.count(rows[0]) == len(rows):
            yield 0, rows[0][0], list(lists)
            return
        for row, scalars in enumerate(rows):
            for group, members in self._groups:
                if len(members) < count:
                    group_lists = [None if x is None else [x[row * count + i] for i in members] for x in lists]
                else:
                    group_lists = [None if x is None else x[row * count : (row + 1) * count] for x in lists]
                yield row, scalars[group], group_lists

    def count_(self, steps: Tensor) -> list[Tensor]:
        """Increment `steps`, `[rows, slots]`, in the table's slots. Return the counts, row by row."""
        steps[:, self._all_slots] += 1
        return [counts[slot] for counts in (row.unbind() for row in steps.unbind()) for _, _, _, slot in self._records]

    def _tensors_of(self, operand: Sequence[Tensor], rows: int) -> list[Tensor] | None:
        """Return the tensors of an operand that has one per segment; None for a field."""
        if len(operand) != self.segments or not self._nonempty:
            return None
        first = self._nonempty[0]
        if operand[first].numel() != rows * self._records[0][1]:
            return None
        tensors = self.nonempty(operand)
        if rows == 1:
            return tensors
        return [tensor for row in zip(*(t.unbind(0) for t in tensors), strict=True) for tensor in row]

    def nonempty(self, operand: Sequence[Tensor]) -> list[Tensor]:
        """Return the tensors of an operand that has one per segment, except the tensors of empty segments."""
        return list(operand) if len(self._nonempty) == self.segments else [operand[i] for i in self._nonempty]

    def _flatten(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [t.as_strided((t.numel(),), (1,)) for t in tensors]

    def _views_of(self, field: Tensor, rows: int, forms: Shapes) -> list[Tensor]:
        """Return views of the segments of a field `[rows, row_size]`; its row stride may be 0."""
        place = rows, field.data_ptr(), field.stride(0)
        entry = self._views.get(field)
        if entry is not None and entry[0] == place and entry[1] == forms:
            return entry[2]
        alias = field.detach()  # shares the version counter; views of the field itself would keep it alive
        starts = [field.storage_offset() + row * field.stride(0) for row in range(rows)]
        views = [
            alias.as_strided(shape, stride, start + record[0])
            for start in starts
            for shape, stride, record in zip(*forms, self._records, strict=True)
        ]
        return self._views.set(field, (place, forms, views))[2]


_plans: WeakTensorMap[TensorLists] = WeakTensorMap()


def tensor_lists_of(table: Tensor) -> TensorLists:
    """Return the plan of a table. The table must not change afterwards."""
    return _plans.get(table) or _plans.set(table, TensorLists(table))
