"""A graph for any numbers of rows and samples, from recordings of two shapes.

The two graphs have the same operations. A number that differs between them is a factor times the number of rows, of
samples, or their product. It becomes an input of one graph that stands for both, and is computed once per shape. The
compiler of torch calls this dynamic shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from fastsam.fed.executors import graph_passes
from fastsam.fed.executors.graph_passes import ProductOf, arguments, aten
from fastsam.fed.executors.graph_recorder import CannotRecordError

# Rows and samples of the two recordings. Rows, samples and products have different ratios, and few layers have these
# sizes.
SHAPES = ((2, 11), (3, 13))
# Exponents of rows and samples in whole numbers, and further ones in floating-point numbers, such as factors of means.
_WHOLE, _FURTHER = ((1, 0), (0, 1), (1, 1)), ((-1, 0), (0, -1), (-1, -1))

Shape = tuple[int, int]  # rows and samples
Number = Callable[[Shape], Any]  # a number of each shape, or a list of numbers


@dataclass(frozen=True)
class Fixed:
    """A number of all shapes."""

    value: Any

    def __call__(self, shape: Shape) -> Any:
        return self.value


@dataclass(frozen=True)
class Power:
    """The number `factor * rows**i * samples**j`, where both exponents are from 0 or both up to 0."""

    factor: int | float
    exponents: tuple[int, int]

    def __call__(self, shape: Shape) -> int | float:
        count = 1
        for n, exponent in zip(shape, self.exponents, strict=True):
            count *= n if exponent else 1
        return self.factor / count if min(self.exponents) < 0 else self.factor * count


@dataclass(frozen=True)
class Several:
    """A list of numbers."""

    numbers: tuple[Number, ...]

    def __call__(self, shape: Shape) -> list[Any]:
        return [number(shape) for number in self.numbers]


@dataclass(frozen=True)
class Product:
    """The function `f(a, b, bias)` that multiplies stacked matrices `a` and `b` of these sizes fastest."""

    a: Several
    b: Several
    dtype: torch.dtype
    device: torch.device
    product_of: ProductOf

    def __call__(self, shape: Shape) -> Any:
        one = torch.empty(1, dtype=self.dtype, device=self.device)
        return self.product_of(one.expand(self.a(shape)), one.expand(self.b(shape))) or _torch_product


def _torch_product(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    return torch.bmm(a, b) if bias is None else torch.baddbmm(bias, a, b)


def _multiply(product: Any, a: Tensor, b: Tensor, bias: Tensor | None) -> Any:
    return product(a, b, bias)


class DynamicGraph:
    """A function of weights and batch with any numbers of rows and samples.

    Args:
        graphs: simplified graphs of recordings of `SHAPES`, without folded constants. The first one is changed.
        product_of: see `graph_passes.use_products`.
        strides: strides of losses and gradients.
        batch: index of the first tensor of the batch, `[rows, samples, ...]`, among the inputs.

    Raises:
        CannotRecordError: the graphs differ in something else than such numbers.
    """

    def __init__(
        self, graphs: Sequence[Graph], product_of: ProductOf, strides: Sequence[tuple[int, ...]], batch: int
    ) -> None:
        graph, other = graphs
        joint = _JointGraph(graph, other, product_of)
        self.batch, self.numbers = batch, list(joint.numbers)
        self._values: dict[Shape, list[Any]] = {}
        self._run = graph_passes.function_of(graph, strides)

    def __call__(self, *inputs: Tensor) -> Sequence[Tensor]:
        rows, samples = inputs[self.batch].shape[:2]
        values = self._values.get((rows, samples))
        if values is None:
            values = self._values[rows, samples] = [number((rows, samples)) for number in self.numbers]
        return self._run(*inputs, *values)


class _JointGraph:
    """A graph of the first shape that gets inputs in place of the numbers in which the graph of the second differs.

    Attributes:
        numbers: the further inputs, in their order.
    """

    def __init__(self, graph: Graph, other: Graph, product_of: ProductOf) -> None:
        self.graph, self.product_of = graph, product_of
        self.numbers: dict[Number, Node] = {}
        self._twins: dict[Node, Node] = {}  # the first graph's node of each node of the second
        nodes, others = list(graph.nodes), list(other.nodes)
        if [_operation(n) for n in nodes] != [_operation(n) for n in others]:
            raise CannotRecordError("the number of samples changes its operations")
        self._last_input = next(n for n in reversed(nodes) if n.op == "placeholder")
        for node, twin in zip(nodes, others, strict=True):
            self._twins[twin] = node
            self._join(node, twin)
        graph_passes.fold_constants(graph)
        graph.eliminate_dead_code()

    def _join(self, node: Node, twin: Node) -> None:
        """Let inputs replace the numbers of an operation that differ, and the choice of a product."""
        value, other = node.meta.get("val"), twin.meta.get("val")
        if node.op == "get_attr" and not _equal(value, other):
            raise CannotRecordError("the number of samples changes its constants")
        if isinstance(value, Tensor) and isinstance(other, Tensor) and value.shape != other.shape:
            node.meta["varies"] = True
        if node.target in (aten.bmm.default, aten.baddbmm.default) and not node.kwargs:
            *bias, a, b = self._argument(node.args, twin.args)
            a_sizes, b_sizes = (_sizes(*pair) for pair in zip((a, b), arguments(twin)[-2:], strict=True))
            like = a.meta["val"]
            product = self._input(Product(a_sizes, b_sizes, like.dtype, like.device, self.product_of))
            node.target, node.args = _multiply, (product, a, b, *(bias or [None]))
        elif node.op in ("call_function", "output"):
            node.args = tuple([self._argument(x, y) for x, y in zip(node.args, twin.args, strict=True)])
            node.kwargs = {name: self._argument(x, twin.kwargs[name]) for name, x in node.kwargs.items()}

    def _argument(self, x: Any, y: Any) -> Any:
        """Return what stands for an argument of both graphs."""
        if isinstance(x, Node) and isinstance(y, Node):
            if self._twins[y] is not x:
                raise CannotRecordError("the number of samples changes its operations")
            return x
        if isinstance(x, (list, tuple)) and isinstance(y, (list, tuple)) and len(x) == len(y):
            if any(isinstance(item, (Node, list, tuple)) for item in x):
                return [self._argument(*pair) for pair in zip(x, y, strict=True)]
            return x if _equal(x, y) else self._input(Several(tuple(map(_number, x, y))))
        return x if _equal(x, y) else self._input(_number(x, y))

    def _input(self, number: Number) -> Node:
        """Return the input for a number."""
        if number not in self.numbers:
            with self.graph.inserting_after(self._last_input):
                self._last_input = self.numbers[number] = self.graph.placeholder(f"number_{len(self.numbers)}")
        return self.numbers[number]


def _operation(node: Node) -> tuple[str, Any]:
    """Return the operation of a node. Inputs and attributes may have other names in another graph."""
    return node.op, node.target if node.op == "call_function" else None


def _sizes(node: Node, twin: Node) -> Several:
    """Return the sizes of a value."""
    return Several(tuple(map(_number, node.meta["val"].shape, twin.meta["val"].shape)))


def _equal(x: Any, y: Any) -> bool:
    if isinstance(x, Tensor):
        return x.dtype == y.dtype and torch.equal(x, y)
    return type(x) is type(y) and bool(x == y)


def _number(x: Any, y: Any) -> Number:
    """Return the number that is x and y in the two shapes. Raises CannotRecordError for other numbers."""
    if _equal(x, y):
        return Fixed(x)
    if type(x) is type(y) and type(x) in (int, float):
        for exponents in _WHOLE if type(x) is int else _WHOLE + _FURTHER:
            count = Power(1, exponents)(SHAPES[0])
            number = Power(x // count if type(x) is int else round(x / count, 9), exponents)
            if [number(shape) for shape in SHAPES] == [x, y]:
                return number
    raise CannotRecordError(f"a number of its operations is {x} with {SHAPES[0]} and {y} with {SHAPES[1]}")
