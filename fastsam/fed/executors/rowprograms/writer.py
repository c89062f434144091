"""A recorded pass written down as a row program's instructions, one operation after the other."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Graph, Node

from fastsam.arena import Segment
from fastsam.fed.executors.rowprograms.lookups import separate_lookups
from fastsam.fed.executors.rowprograms.memory_plan import ROWS, MemoryPlan, check_dtype, root
from fastsam.fed.executors.simplify import arguments, aten, outputs
from fastsam_kernels.rowprograms.instructions import (
    DIMS,
    IGNORED,
    MAX_PRODUCTS,
    OUT,
    Code,
    Instruction,
    NoFormError,
    RowOperand,
)

_UNARY = {
    aten.relu.default: Code.RELU,
    aten.neg.default: Code.NEGATE,
    aten.exp.default: Code.EXPONENTIAL,
    aten.log.default: Code.LOGARITHM,
    aten.sqrt.default: Code.ROOT,
    aten.rsqrt.default: Code.INVERSE_ROOT,
    aten.abs.default: Code.MAGNITUDE,
    aten.tanh.default: Code.TANH,
    aten.sigmoid.default: Code.SIGMOID,
    aten.erf.default: Code.ERROR_FUNCTION,
}
_BINARY = {
    aten.mul.Tensor: Code.MULTIPLY,
    aten.mul.Scalar: Code.MULTIPLY,
    aten.div.Tensor: Code.DIVIDE,
    aten.div.Scalar: Code.DIVIDE,
    aten.tanh_backward.default: Code.TANH_BACKWARD,
    aten.sigmoid_backward.default: Code.SIGMOID_BACKWARD,
}


class Writer:
    """The writer of the program of a graph over `ROWS` rows, whose outputs are losses and gradients of `segments`.

    The gradients are stored in rows of `row_size` elements, as the segments say, and the loss after them.

    Raises:
        NoFormError: an operation has no form.
    """

    def __init__(self, graph: Graph, segments: Sequence[Segment], row_size: int) -> None:
        separate_lookups(graph)
        self.places, self.instructions = MemoryPlan(graph), list[Instruction]()
        result_layouts = [(row_size, 1, ()), *((s.offset, s.length, tuple(s.stride)) for s in segments)]
        results = list(zip(outputs(graph), result_layouts, strict=True))
        copies = [
            (node, offset, strides)
            for node, (offset, length, strides) in results
            if not self.places.place_output(node, offset, length, strides)
        ]
        for node in graph.nodes:
            if node.op == "call_function" and node.target is not operator.getitem and root(node) is node:
                self._write(node)
            self.places.scratch.free(node)
        for node, offset, strides in copies:  # outputs in another memory order, inputs, and outputs that are equal
            self._add(Code.COPY, node.meta["val"].shape, RowOperand(OUT, offset, strides), node)

    # --- operations ---

    def _write(self, call: Node) -> None:
        op, args = call.target, arguments(call)
        if op in _UNARY and not call.kwargs:
            self._elementwise(call, _UNARY[op], args[0])
        elif op in _BINARY and len(args) == 2 and not call.kwargs:
            self._binary(call, _BINARY[op])
        elif op in _WRITERS:
            _WRITERS[op](self, call)
        else:
            raise NoFormError(f"{op} has no form")

    def _add(self, code: Code, shape: Sequence[int], out: RowOperand, *sources: Node, number: float = 0.0) -> None:
        operands = [self.places.read(v, shape) for v in sources]
        self.instructions.append(Instruction(code, tuple(shape[1:]), out, *operands, number=float(number)).flatten())

    def _elementwise(self, call: Node, code: Code, *operands: Any, number: float = 0.0) -> None:
        """Write an elementwise operation on tensors and plain numbers."""
        if not all(isinstance(v, Node) for v in operands) or type(number) not in (int, float):
            raise NoFormError(f"{call.target} of other arguments")
        check_dtype(call.meta["val"], is_floating=True)
        self._add(code, call.meta["val"].shape, self.places.new(call), *operands, number=number)

    def _binary(self, call: Node, code: Code) -> None:
        a, b = arguments(call)
        if code in (Code.MULTIPLY, Code.DIVIDE) and type(b) in (int, float) and (b or code is Code.MULTIPLY):
            self._elementwise(call, Code.SCALE, a, number=b if code is Code.MULTIPLY else 1.0 / b)
        else:
            self._elementwise(call, code, a, b)

    def _copy(self, call: Node) -> None:
        self._add(Code.COPY, call.meta["val"].shape, self.places.new(call), arguments(call)[0])

    def _product(self, call: Node) -> None:
        *bias, a, b = arguments(call)
        (_, m, k), n = a.meta["val"].shape, b.meta["val"].shape[2]
        if call.kwargs or m * k * n > MAX_PRODUCTS or not call.meta["val"].is_contiguous():
            raise NoFormError(f"a product of {m}x{k}x{n}")
        operands = [self.places.read(a, (ROWS, m, k)), self.places.read(b, (ROWS, k, n))]
        operands += [self.places.read(c, (ROWS, m, n)) for c in bias]
        self.instructions.append(Instruction(Code.PRODUCT, (m, k, n), self.places.new(call), *operands))

    def _sum(self, call: Node) -> None:
        operand, dims, *keep = arguments(call)
        shape = operand.meta["val"].shape
        check_dtype(operand.meta["val"])
        reduced_dims = {d % len(shape) for d in dims or range(len(shape))}
        if 0 in reduced_dims or call.kwargs:
            raise NoFormError("a sum over rows")
        place = self.places.new(call)
        kept_strides = iter(s for d, s in enumerate(place.strides, 1) if not (any(keep) and d in reduced_dims))
        strides = tuple(0 if d in reduced_dims else next(kept_strides) for d in range(1, len(shape)))
        self._add(Code.SUM, shape, replace(place, strides=strides), operand)

    def _log_softmax(self, call: Node) -> None:
        backward, t = call.target is aten._log_softmax_backward_data.default, call.meta["val"]
        dim, sources = arguments(call)[2 if backward else 1] % t.dim(), arguments(call)[: 2 if backward else 1]
        if dim == 0 or (arguments(call)[3] is not torch.float32 if backward else arguments(call)[2]):
            raise NoFormError("a softmax over rows, or in another precision")
        code = Code.LOG_SOFTMAX_BACKWARD if backward else Code.LOG_SOFTMAX
        operands = [self.places.read(n, t.shape) for n in sources]
        instruction = Instruction(code, tuple(t.shape[1:]), self.places.new(call), *operands)
        self.instructions.append(instruction.by_classes(dim - 1))

    def _nll(self, call: Node) -> None:
        """Write an nll_loss2d: losses `[rows, 1, n]` of `[rows, classes, 1, n]` and labels `[rows, 1, n]`, as it is
        called for stacked clients."""
        scores, labels, weight, reduction, ignore_index = arguments(call)
        losses = next((user for user in call.users if arguments(user)[1] == 0), None)
        if losses is None or weight is not None or reduction != 0 or ignore_index != IGNORED or call.kwargs:
            raise NoFormError("a loss with options")
        shape = scores.meta["val"].shape
        out = _with_classes(self.places.new(losses))
        self._add_label_op(Code.NLL, shape, out, self.places.read(scores, shape), labels)

    def _nll_backward(self, call: Node) -> None:
        g, scores, labels, weight, reduction, ignore_index, _ = arguments(call)
        if weight is not None or reduction != 0 or ignore_index != IGNORED or call.kwargs:
            raise NoFormError("a loss with options")
        operands = _with_classes(self.places.read(g, labels.meta["val"].shape))
        self._add_label_op(Code.NLL_BACKWARD, scores.meta["val"].shape, self.places.new(call), operands, labels)

    def _add_label_op(self, code: Code, shape: Sequence[int], out: RowOperand, a: RowOperand, labels: Node) -> None:
        """Write an instruction that reads labels, with the sizes outer, classes, inner."""
        _, classes, height, width = shape
        b = self.places.labels(labels)
        b = replace(b, strides=(b.strides[0], 0, b.strides[1]))

        def transpose(o: RowOperand) -> RowOperand:
            return replace(o, strides=(o.strides[1], o.strides[0], o.strides[2]))

        self.instructions.append(Instruction(code, (height, classes, width), transpose(out), transpose(a), b))

    def _look_up(self, call: Node) -> None:
        """Write a lookup or its gradient, with the sizes outer, middle, count, inner (see `separate_lookups`)."""
        source, indices, *options = arguments(call)
        is_backward = bool(options)
        table_shape = (call if is_backward else source).meta["val"].shape
        dims = indices.meta["val"].shape[1:]
        if len(table_shape) != 3 or len(options) > 2 or not 1 <= len(dims) <= 2:
            raise NoFormError("a lookup with options, or by indices of several dimensions")
        places, entries = self.places.labels(indices), self.places.read(source, source.meta["val"].shape)
        table = self.places.new(call)
        if not is_backward:
            table, entries = entries, table
        table = replace(table, strides=(0, 0, *table.strides))
        outer, middle, inner = (0, *entries.strides)[-3:]
        entries = replace(entries, strides=(outer, middle, 0, inner))
        places = replace(places, strides=(*(0, *places.strides)[-2:], 0, 0))
        code, operands = (Code.LOOK_UP_BACKWARD, (table, entries)) if is_backward else (Code.LOOK_UP, (entries, table))
        sizes = (*(1, *dims)[-2:], *table_shape[1:])
        number = float(options[1]) if is_backward else 0.0
        self.instructions.append(Instruction(code, sizes, *operands, places, number=number))

    def _is_not(self, call: Node) -> None:
        (labels, number), t = arguments(call), call.meta["val"]
        if type(number) is not int or not 1 < t.dim() <= 1 + DIMS:
            raise NoFormError("a comparison of other arguments")
        operand = self.places.labels(labels)
        self.instructions.append(
            Instruction(Code.IS_NOT, tuple(t.shape[1:]), self.places.new(call), operand, number=number)
        )

    def _sum_of_two(self, call: Node) -> None:
        alpha: Any = call.kwargs.get("alpha", 1)
        if set(call.kwargs) - {"alpha"}:
            raise NoFormError(f"{call.target} with options")
        a, b = arguments(call)
        sign = -alpha if call.target is aten.sub.Tensor else alpha
        if type(b) in (int, float):
            self._elementwise(call, Code.SHIFT, a, number=sign * b)
        else:
            self._elementwise(call, Code.ADD, a, b, number=sign)

    def _power(self, call: Node) -> None:
        self._elementwise(call, Code.POWER, arguments(call)[0], number=arguments(call)[1])

    def _threshold_backward(self, call: Node) -> None:
        self._elementwise(call, Code.THRESHOLD_BACKWARD, *arguments(call)[:2], number=arguments(call)[2])

    def _multiply_add(self, call: Node) -> None:
        if set(call.kwargs) - {"value"}:
            raise NoFormError(f"{call.target} with options")
        value: Any = call.kwargs.get("value", 1)
        self._elementwise(call, Code.MULTIPLY_ADD, *arguments(call), number=value)


_WRITERS: dict[Any, Callable[[Writer, Node], None]] = {
    aten.clone.default: Writer._copy,
    aten.bmm.default: Writer._product,
    aten.baddbmm.default: Writer._product,
    aten.sum.dim_IntList: Writer._sum,
    aten._log_softmax.default: Writer._log_softmax,
    aten._log_softmax_backward_data.default: Writer._log_softmax,
    aten.nll_loss2d_forward.default: Writer._nll,
    aten.nll_loss2d_backward.default: Writer._nll_backward,
    aten.embedding.default: Writer._look_up,
    aten.embedding_dense_backward.default: Writer._look_up,
    aten.ne.Scalar: Writer._is_not,
    aten.add.Tensor: Writer._sum_of_two,
    aten.add.Scalar: Writer._sum_of_two,
    aten.sub.Tensor: Writer._sum_of_two,
    aten.pow.Tensor_Scalar: Writer._power,
    aten.threshold_backward.default: Writer._threshold_backward,
    aten.addcmul.default: Writer._multiply_add,
}


def _with_classes(o: RowOperand) -> RowOperand:
    """Return the operand `[down, across]` as `[classes, down, across]`."""
    return replace(o, strides=(0, *o.strides))
