"""The memory plan of a row program: tensors of a recorded pass as parts of one row of its inputs, of its result, or of
scratch memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import Graph, Node

from fastsam.fed.executors.simplify import memory
from fastsam_kernels.rowprograms.instructions import FIRST_INPUT, OUT, SCRATCH, Input, NoFormError, RowOperand

ROWS = 2  # rows of a recording for a row program, whose rows must not depend on their number


@dataclass
class Allocation:
    """The location of the elements of a tensor that is not a view.

    Attributes:
        tensor: the tensor of the recording.
        labels, one: see `Input`.
    """

    base: int
    offset: int
    tensor: Tensor
    labels: bool = False
    one: bool = False


class MemoryPlan:
    """The locations of all nodes of a graph.

    Attributes:
        inputs: the inputs that the graph reads, in order.
        constants: the inputs that are tensors of the model.
        scratch: memory of intermediate results.
    """

    def __init__(self, graph: Graph) -> None:
        self.inputs, self.constants = list[Input](), list[Tensor]()
        self._places: dict[Node, Allocation] = {}
        self.scratch = Scratch(graph)
        for node in graph.find_nodes(op="placeholder"):
            self._add(node, rows=1)

    def read(self, node: Node, shape: Sequence[int]) -> RowOperand:
        """Return `node`, broadcast to the stacked `shape`. Raises NoFormError if rows do not stay separate."""
        place, t = self._place(node), node.meta["val"]
        check_dtype(t)
        if shape[0] != ROWS or 0 in shape:
            raise NoFormError("a tensor without rows, or without elements")
        try:
            strides = t.expand(list(shape)).stride()
        except RuntimeError:
            raise NoFormError("shapes that are not broadcast") from None
        row_stride = 0 if place.one or place.tensor.dim() == 0 else place.tensor.stride(0)
        if strides[0] != row_stride or place.labels:
            raise NoFormError("rows that overlap, or labels as numbers")
        return RowOperand(place.base, _offset(place, t), strides[1:])

    def labels(self, node: Node) -> RowOperand:
        """Return class numbers as they are, int64 `[rows, ...]`. Raises NoFormError for labels that are computed."""
        place, t = self._place(node), node.meta["val"]
        if not place.labels or place.one or t.stride(0) != place.tensor.stride(0):
            raise NoFormError("labels that are computed")
        return RowOperand(place.base, _offset(place, t), t.stride()[1:])

    def new(self, node: Node) -> RowOperand:
        """Allocate the result of an operation. Raises NoFormError if it has no rows."""
        t = node.meta["val"]
        if t.dim() < 1 or t.shape[0] != ROWS or t.stride(0) < span(t):
            raise NoFormError("a result without rows, or with rows in each other")
        if node not in self._places:
            self._places[node] = Allocation(SCRATCH, self.scratch.take(node), t)
        place = self._places[node]
        return RowOperand(place.base, place.offset, t.stride()[1:])

    def place_output(self, node: Node, offset: int, length: int, strides: tuple[int, ...]) -> bool:
        """Let an output be computed at its place in the result. Return False if it must be copied there."""
        base, t = root(node), node.meta["val"]
        if (
            base.op != "call_function"
            or base in self._places
            or span(base.meta["val"]) != length
            or t.stride()[1:] != strides
        ):
            return False
        self._places[base] = Allocation(OUT, offset, base.meta["val"])
        return True

    def _place(self, node: Node) -> Allocation:
        base = root(node)
        if base not in self._places:
            if base.op == "call_function":
                raise NoFormError("a result that is read in part")
            self._add(base, rows=0)
            self.constants.append(base.meta["val"])
        return self._places[base]

    def _add(self, node: Node, rows: int) -> None:
        """Add a tensor that no operation makes. `rows` is 1 if its first dimension is the rows, else 0."""
        t = node.meta["val"]
        labels = t.dtype == torch.int64
        if not labels:
            check_dtype(t, is_floating=True)
        if not t.numel():
            raise NoFormError("an empty tensor")
        self._places[node] = Allocation(FIRST_INPUT + len(self.inputs), 0, t, labels, one=not rows)
        self.inputs.append(Input(tuple(t.shape[rows:]), tuple(t.stride()[rows:]), labels, one=not rows))


class Scratch:
    """Memory of a row for intermediate results. The memory of results that are no longer read is used again."""

    def __init__(self, graph: Graph) -> None:
        self.size, self._allocations = 0, dict[Node, tuple[int, int]]()
        last = {root(source): node for node in graph.nodes for source in node.all_input_nodes}
        self._ends: dict[Node, list[Node]] = {}
        for node, reader in last.items():
            self._ends.setdefault(reader, []).append(node)

    def take(self, node: Node) -> int:
        """Allocate the first free place, in whole cache lines, and return its offset."""
        length, offset = -(-span(node.meta["val"]) // 16) * 16, 0
        for begin, end in sorted(self._allocations.values()):
            if offset + length <= begin:
                break
            offset = max(offset, end)
        self._allocations[node] = offset, offset + length
        self.size = max(self.size, offset + length)
        return offset

    def free(self, reader: Node) -> None:
        """Free the memory of nodes that an operation was the last to read."""
        for node in self._ends.get(reader, ()):
            self._allocations.pop(node, None)


def root(node: Node) -> Node:
    """Return the node that a view is a view of. No other operation has the memory of one of its operands."""
    source = next((n for n in node.all_input_nodes if memory(n) == memory(node)), None)
    return node if source is None else root(source)


def span(t: Tensor) -> int:
    """Return the number of elements from a row's first to its last, both counted."""
    return 1 + sum((size - 1) * stride for size, stride in zip(t.shape[1:], t.stride()[1:], strict=True))


def check_dtype(t: Tensor, is_floating: bool = False) -> None:
    """Check the dtype of a tensor. Counts and conditions are floats in a row program. Raises NoFormError if they cannot
    be."""
    if t.dtype != torch.float32 and (is_floating or t.dtype not in (torch.bool, torch.int64)):
        raise NoFormError(f"numbers in {t.dtype}")


def _offset(place: Allocation, t: Tensor) -> int:
    return place.offset + int(t.storage_offset()) - int(place.tensor.storage_offset())
