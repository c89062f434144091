"""Passes of stacked clients without the model's Python: recorded once as a graph of torch's operations, and run from
the graph.

The recorder is below autograd and vmap, so the part of torch above an operation (most of a small model's pass) happens
once. A recording runs in one of three ways. A row program serves batches of one size and any number of rows. A joint
graph serves batches of any size, and a graph of one shape what both do not serve.

The plain pass defines the meaning. A recording is compared with it, on the same rows, for two passes, and for the first
pass of each size of a batch, because a model may choose its operations by the size. A recording that differs leaves the
size to the next way. The choice depends only on model and shapes, so a continued run has the bits of an uninterrupted
one.
"""

from __future__ import annotations

import logging
import operator
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functionalize
from torch.fx import Graph, Node
from torch.utils._python_dispatch import TorchDispatchMode

from fastsam.arena import Layout
from fastsam.fed.clients.samples import Tensors
from fastsam.fed.executors.python_state import difference, python_state
from fastsam.fed.executors.rowprograms import RowPass
from fastsam.fed.executors.rowprograms.forms import FORMS
from fastsam.fed.executors.rowprograms.memory_plan import ROWS
from fastsam.fed.executors.simplify import arguments, aten, calls, function_of, memory, module_of, outputs, simplify
from fastsam.fed.executors.stacked_dropout import draws

log = logging.getLogger("fastsam.fed")

Plain = Callable[..., tuple[Tensor, Sequence[Tensor | None]]]  # from a list of weights and the tensors of a batch
Function = Callable[..., Sequence[Tensor]]  # from weights and batch to losses and gradients
PassResult = tuple[Tensor, list[Tensor], tuple[int, ...]]  # losses, gradients that there are, and of which parameters
Shape = tuple[int, int]  # rows and samples
Number = Callable[[Shape], Any]  # a number of each shape, or a list of numbers, or a function
ProductOf = Callable[[Tensor, Tensor], Any]  # from stacked matrices to the fastest f(a, b, bias), or None for torch's
Key = tuple[object, ...]
Forms = Mapping[Any, Callable[..., Any] | None]  # see `Recorder`
NO_FORMS: Forms = MappingProxyType({})

# Number of recordings that are remembered, some hundred kilobytes each. The least recently used one goes first.
MAX_RECORDINGS = 256
# Rows and samples of the two recordings of a joint graph. Rows, samples and products have different ratios, and few
# layers have these sizes.
SHAPES = ((2, 11), (3, 13))
# Exponents of rows and samples in numbers of a joint graph: in whole numbers, and in factors, as a mean has.
_WHOLE, _REAL = ((1, 0), (0, 1), (1, 1)), ((1, 0), (0, 1), (1, 1), (-1, 0), (0, -1), (-1, -1))
# Largest relative errors of a loss, and of the norm of all gradients. A maximum or a kink that rounding moves
# (max-pooling, ReLU) changes single elements of a gradient much more than rounding, but not the loss.
_LOSS, _GRADIENT = {torch.float32: 1e-4, torch.float64: 1e-9}, 0.01
BF16_LOSS = 0.01  # the same of passes in bfloat16


class CannotRecordError(RuntimeError):
    """The pass cannot be replayed as a graph of operations; the message says why."""


# --- recordings ---


class Recorder(TorchDispatchMode):
    """A mode that runs every operation and adds it to a graph. A node has its value in `meta["val"]`.

    torch's `make_fx` records the same operations in four times the time, with metadata of each. A tensor that comes
    from no recorded operation is an attribute of the graph's module.

    Args:
        inputs: the inputs of the graph.
        forms: functions that take the place of operations. None ends the recording with CannotRecordError.
    """

    def __init__(self, inputs: Sequence[Tensor], forms: Forms) -> None:
        super().__init__()
        self.graph, self.forms = Graph(), forms
        self.graph.owning_module = self._root = nn.Module()  # type: ignore[assignment]
        self._nodes: dict[int, Node] = {}  # by the id of the tensor
        self._tensors: list[Tensor] = []  # kept alive, because an id may be used again
        for i, x in enumerate(inputs):
            self._keep(self.graph.placeholder(f"input_{i}"), x)

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in self.forms:
            form = self.forms[func]
            if form is None:
                raise CannotRecordError(f"it calls {func}")
            with self:
                return form(*args, **kwargs)
        if torch.Tag.data_dependent_output in func.tags:
            raise CannotRecordError(f"it reads the value of a tensor ({func})")
        if func is aten.ones_like.default and args[0].dim() == 0:
            return func(*args, **kwargs)  # the seed of the backward pass, a constant
        if func is aten.mul.Scalar and args[1] == 1 and args[0].is_floating_point():
            func, args = aten.alias.default, args[:1]  # vmap's rule for a linear layer multiplies the bias by one
        target = func
        if func is aten.lift_fresh.default:  # a tensor that the model made from numbers, into which it may write
            self._add_attribute(args[0], args[0].detach().clone())
            target = aten.lift_fresh_copy.default
        node_args = tuple([self._nodes_in(x) for x in args])
        node_kwargs = {name: self._nodes_in(x) for name, x in kwargs.items()}
        result = func(*args, **kwargs)
        node = self.graph.call_function(target, node_args, node_kwargs)
        if isinstance(result, Tensor):
            self._keep(node, result)
        elif isinstance(result, (tuple, list)):
            node.meta["val"] = result
            for i, x in enumerate(result):
                if isinstance(x, Tensor):
                    self._keep(self.graph.call_function(operator.getitem, (node, i)), x)
        return result

    def _keep(self, node: Node, x: Tensor) -> None:
        node.meta["val"] = x.detach()
        self._nodes[id(x)] = node
        self._tensors.append(x)

    def _nodes_in(self, x: Any) -> Any:
        """Return an argument with nodes in place of tensors. A list of an operation has no list in it."""
        if isinstance(x, (list, tuple)):
            return [self.node_of(item) if isinstance(item, Tensor) else item for item in x]
        return self.node_of(x) if isinstance(x, Tensor) else x

    def node_of(self, x: Tensor) -> Node:
        """Return the node whose value is x: of an operation, or of an attribute."""
        if id(x) not in self._nodes:
            self._add_attribute(x, x.detach())
        return self._nodes[id(x)]

    def _add_attribute(self, x: Tensor, value: Tensor) -> None:
        name = f"tensor_{len(self._tensors)}"
        self._root.register_buffer(name, value)
        self._keep(self.graph.get_attr(name), x)


def record(function: Callable[..., Sequence[Tensor]], inputs: Sequence[Tensor], forms: Forms = NO_FORMS) -> Graph:
    """Return the graph of `function(*inputs)`, evaluated at the inputs. See `Recorder`.

    Raises:
        CannotRecordError: the function reads the value of a tensor, or calls an operation whose form is None.
    """
    recorder = Recorder(inputs, forms)
    with recorder:
        results = function(*inputs)
    recorder.graph.output(tuple(map(recorder.node_of, results)))
    return recorder.graph


class Recording(NamedTuple):
    """A simplified, evaluated graph from weights and batch to losses and gradients, and the indices of the parameters
    that have a gradient."""

    graph: Graph
    slots: tuple[int, ...]


def run_plain(plain: Plain, weights: Sequence[Tensor], batch: Sequence[Tensor]) -> PassResult:
    """Return the results of a plain pass at weights, which need not be leaves."""
    losses, grads = plain([w.detach().requires_grad_() for w in weights], *batch)
    slots = tuple(i for i, g in enumerate(grads) if g is not None)
    return losses, [g for g in grads if g is not None], slots


def record_pass(plain: Plain, weights: Sequence[Tensor], *batch: Tensor, forms: Forms = NO_FORMS) -> Recording:
    """Return the recording of `plain` at weights and a batch.

    Raises:
        CannotRecordError: the pass cannot be recorded.
    """
    slots: tuple[int, ...] = ()

    def flat(*tensors: Tensor) -> tuple[Tensor, ...]:
        nonlocal slots
        losses, grads, slots = run_plain(plain, tensors[: len(weights)], tensors[len(weights) :])
        return (losses, *grads)

    inputs = [*(w.detach() for w in weights), *(t.clone() for t in batch)]  # which the model may write
    graph = record(flat, inputs, forms)
    if any(map(_writes, graph.nodes)):
        with torch.no_grad():
            graph = record(functionalize(module_of(graph)), inputs)
    _check(graph)
    simplify(graph)
    return Recording(graph, slots)


def _check(graph: Graph) -> None:
    for node in calls(graph):
        if not isinstance(node.target, torch._ops.OpOverload) and node.target is not operator.getitem:
            raise CannotRecordError(f"it calls {node.target}, which is not an operation on tensors")
        if draws(node.target, node.args, node.kwargs):
            raise CannotRecordError(f"it draws random numbers ({node.target})")
        if _writes(node):
            raise CannotRecordError(f"it writes into memory that is read elsewhere ({node.target})")
    inputs = {memory(n) for n in graph.nodes if n.op == "placeholder"}
    attributes = [n for n in graph.nodes if n.op == "get_attr"]
    if any(memory(n) in inputs for n in attributes):
        raise CannotRecordError("it reads the memory of weights or batches by another way than its inputs")
    if any(n in attributes for n in outputs(graph)):
        raise CannotRecordError("its losses or gradients come from operations that were not recorded")


def _writes(node: Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


# --- joint graphs ---


def joint_function(
    graph: Graph, other: Graph, product_of: ProductOf, strides: Sequence[tuple[int, ...]], batch: int
) -> Function:
    """Return the function of weights and batches that simplified graphs of `SHAPES` stand for, for any numbers of rows
    and samples. For one shape both graphs are the same.

    The two graphs have the same operations. A number that differs between them is a factor times the number of rows, of
    samples, or their product. It becomes an input of the first graph, which stands for both, and is computed once per
    shape. The compiler of torch calls this dynamic shapes.

    Args:
        graph, other: graphs of the first and of the second shape. The first one is changed.
        product_of: see `ProductOf`.
        strides: strides of losses and gradients.
        batch: index of the first tensor of the batch, `[rows, samples, ...]`, among the inputs.

    Raises:
        CannotRecordError: the graphs differ in something else than such numbers.
    """
    numbers = _Joint(graph, other, product_of).numbers
    run, values = function_of(graph, strides), dict[Shape, list[Any]]()

    def function(*inputs: Tensor) -> Sequence[Tensor]:
        rows, samples = inputs[batch].shape[:2]
        shape = rows, samples
        if shape not in values:
            values[shape] = [number(shape) for number in numbers]
        return run(*inputs, *values[shape])

    return function


class _Joint:
    """The first of two graphs, with inputs in place of the numbers in which it differs from the second, and in place of
    the functions that multiply matrices.

    Attributes:
        numbers: the further inputs, in their order.
    """

    def __init__(self, graph: Graph, other: Graph, product_of: ProductOf) -> None:
        self.numbers: list[Number] = []
        self._graph, self._product_of = graph, product_of
        self._inputs: dict[str, Node] = {}  # by the two numbers
        self._twins: dict[Node, Node] = {}  # the first graph's node of each node of the second
        nodes, others = list(graph.nodes), list(other.nodes)
        if [_operation(n) for n in nodes] != [_operation(n) for n in others]:
            raise CannotRecordError("the number of samples changes its operations")
        self._last_input = next(n for n in reversed(nodes) if n.op == "placeholder")
        for node, twin in zip(nodes, others, strict=True):
            self._twins[twin] = node
            self._join(node, twin)

    def _join(self, node: Node, twin: Node) -> None:
        """Let inputs replace the numbers of an operation that differ, and the choice of a product."""
        if node.op == "get_attr" and not _equal(node.meta["val"], twin.meta["val"]):
            raise CannotRecordError("the number of samples changes its constants")
        args = tuple([self._joined(*pair) for pair in zip(node.args, twin.args, strict=True)])
        if node.target in (aten.bmm.default, aten.baddbmm.default) and not node.kwargs:
            *bias, a, b = args
            node.target, args = _multiply, (self._product(twin, a, b), a, b, *(bias or [None]))
        node.args = args
        node.kwargs = {name: self._joined(x, twin.kwargs[name]) for name, x in node.kwargs.items()}

    def _joined(self, x: Any, y: Any) -> Any:
        """Return what stands for an argument of both graphs."""
        if isinstance(x, Node) and isinstance(y, Node):
            if self._twins[y] is not x:
                raise CannotRecordError("the number of samples changes its operations")
            return x
        if isinstance(x, (list, tuple)) and any(isinstance(item, Node) for item in x) and len(x) == len(y):
            return [self._joined(*pair) for pair in zip(x, y, strict=True)]
        return x if _equal(x, y) else self._input(repr((x, y)), number_of(x, y))

    def _product(self, twin: Node, a: Node, b: Node) -> Node:
        """Return the input for the function that multiplies `a` and `b` fastest."""
        like, pairs = a.meta["val"], list(zip((a, b), arguments(twin)[-2:], strict=True))
        sizes = [tuple(n.meta["val"].shape for n in pair) for pair in pairs]
        a_sizes, b_sizes = (number_of(*pair) for pair in sizes)

        def product(shape: Shape) -> Any:
            one = torch.empty(1, dtype=like.dtype, device=like.device)
            return self._product_of(one.expand(a_sizes(shape)), one.expand(b_sizes(shape))) or _torch_product

        return self._input(repr((sizes, like.dtype)), product)

    def _input(self, key: str, number: Number) -> Node:
        if key not in self._inputs:
            with self._graph.inserting_after(self._last_input):
                self._last_input = self._inputs[key] = self._graph.placeholder(f"number_{len(self.numbers)}")
            self.numbers.append(number)
        return self._inputs[key]


def number_of(x: Any, y: Any) -> Number:
    """Return the number, or the list of numbers, that is x and y in the two `SHAPES`. Raises CannotRecordError if it is
    not a factor times a power of rows and samples."""
    if isinstance(x, (list, tuple)) and isinstance(y, (list, tuple)) and len(x) == len(y):
        numbers = list(map(number_of, x, y))
        return lambda shape: [number(shape) for number in numbers]
    if _equal(x, y):
        return lambda shape: x
    if type(x) is type(y) and type(x) in (int, float):
        for exponents in _WHOLE if type(x) is int else _REAL:
            count = _power(1, exponents, SHAPES[0])
            factor = x // count if type(x) is int else round(x / count, 9)
            if [_power(factor, exponents, shape) for shape in SHAPES] == [x, y]:
                return lambda shape: _power(factor, exponents, shape)
    raise CannotRecordError(f"a number of its operations is {x} with {SHAPES[0]} and {y} with {SHAPES[1]}")


def _power(factor: float, exponents: tuple[int, int], shape: Shape) -> float:
    """Return `factor * rows**i * samples**j`, where both exponents are from 0 or both up to 0."""
    count = shape[0] ** abs(exponents[0]) * shape[1] ** abs(exponents[1])
    return factor / count if min(exponents) < 0 else factor * count


def _torch_product(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    return torch.bmm(a, b) if bias is None else torch.baddbmm(bias, a, b)


def _multiply(product: Any, a: Tensor, b: Tensor, bias: Tensor | None) -> Any:
    return product(a, b, bias)


def _operation(node: Node) -> tuple[str, Any]:
    """Return the operation of a node. Inputs and attributes may have other names in another graph."""
    return node.op, node.target if node.op == "call_function" else None


def _equal(x: Any, y: Any) -> bool:
    if isinstance(x, Tensor):
        return x is y or (x.dtype == y.dtype and torch.equal(x, y))
    return type(x) is type(y) and bool(x == y)


# --- replays ---


@dataclass
class Replay:
    """A way to run passes from a recording.

    Attributes:
        function: the replayed pass.
        slots: indices of the parameters that have a gradient.
        count: number of passes that were compared and were right.
        rows: the number of rows of the last of them, for each size of a batch.
        wrong_sizes: sizes of a batch for which it was wrong.
    """

    function: Function
    slots: tuple[int, ...]
    count: int = 0
    rows: dict[int, int] = field(default_factory=dict)
    wrong_sizes: set[int] = field(default_factory=set)

    def is_known(self, size: int) -> bool:
        """Return True if passes over batches of that size are no longer compared."""
        return self.count > 1 and size in self.rows

    @torch.no_grad()
    def run(self, weights: list[Tensor], batch: Tensors) -> PassResult:
        """Run a pass."""
        losses, *grads = self.function(*weights, *batch)
        return losses, grads, self.slots


class Replays:
    """Replayed passes of one model and one loss.

    Args:
        plain: losses `[rows]` and gradients `[rows, *shape]` (None for parameters that the loss does not use) of
            weights and a batch.
        module, layout: the model and the layout of its parameters.
        make_row_pass: makes a row program from a graph and the parameters of its gradients, or returns None if an
            operation has no form. None if there are no row programs.
        product_of: see `ProductOf`.

    Attributes:
        reason: why nothing is replayed any more, or None.
    """

    def __init__(
        self,
        plain: Plain,
        module: nn.Module,
        layout: Layout,
        make_row_pass: Callable[[Graph, Sequence[int]], RowPass | None] | None = None,
        product_of: ProductOf = lambda a, b: None,
    ) -> None:
        self.plain, self.module, self.layout = plain, module, layout
        self.make_row_pass, self.product_of = make_row_pass, product_of
        self.reason: str | None = None
        self._replays: OrderedDict[Key, Replay | None] = OrderedDict()
        self._formless: set[Key] = set()  # keys of joint graphs for which there is no row program of any size
        self._warned_reasons: set[str] = set()

    def run(self, weights: list[Tensor], *batch: Tensor) -> PassResult | None:
        """Run a pass at `weights` (`[rows, *shape]`, leaves of autograd) on a batch, each tensor `[rows, batch, ...]`.
        Return None if the plain pass has to run. Gradients are stored in the layout's order, in separate memory."""
        batch, size = tuple([t.contiguous() for t in batch]), batch[0].shape[1]
        for replay in self._ways(weights, batch):
            if replay.is_known(size):
                with suppress(RuntimeError):  # the plain pass raises the own error of a wrong batch
                    return replay.run(weights, batch)
            result = self._compared(replay, weights, batch)
            if result is not None or size not in replay.wrong_sizes:
                return result
        return None

    def find(self, rows: int, size: int, *samples: Tensor) -> Replay | None:
        """Return the way to run passes of `rows` rows with a batch of `size` samples like `samples` (each `[n, ...]`),
        or None if it has not been compared yet."""
        replays = map(self._replays.get, self._keys(rows, size, samples, 1))
        replay = next((replay for replay in replays if replay is not None and size not in replay.wrong_sizes), None)
        return replay if self.reason is None and replay is not None and replay.is_known(size) else None

    def has_row_program(self, weights: list[Tensor], *batch: Tensor) -> bool:
        """Return True if a pass as in `run` can be recorded as a row program. It is not compared."""
        try:
            return self.make_row_pass is not None and self._row_program(weights, batch) is not None
        except CannotRecordError:
            return False

    # --- the ways to run a pass ---

    def _keys(self, rows: int, size: int, tensors: Sequence[Tensor], dims: int) -> tuple[Key, Key, Key]:
        """Return the keys of the row program, the joint graph and the graph of one shape for such batches. A sample has
        the dimensions from `dims` on."""
        key = (*[t.shape[dims:] for t in tensors], *[t.dtype for t in tensors], self.module.training)
        return (size, *key), key, (rows, size, *key)

    def _ways(self, weights: list[Tensor], batch: Tensors) -> Iterator[Replay]:
        """Yield the recordings that may serve a batch, the first choice first. The first batch of a key is recorded."""
        rows, size = batch[0].shape[:2]
        keys = self._keys(rows, size, batch, 2)
        ways = list(zip(keys, (self._row_program, self._joint, self._of_shape), strict=True))
        has_programs = self.make_row_pass is not None and keys[1] not in self._formless
        for key, make in ways if has_programs else ways[1:]:
            if self.reason is not None:
                return
            reason = None
            if key not in self._replays:
                try:
                    self._replays[key] = make(weights, batch)
                except CannotRecordError as error:  # the next way may be possible
                    self._replays[key], reason = None, str(error)
                    log.debug("executor vmap: there is no %s of a step: %s", make.__name__, error)
                if len(self._replays) > MAX_RECORDINGS:
                    self._replays.popitem(last=False)
            self._replays.move_to_end(key)
            replay = self._replays[key]
            if replay is not None:
                reason = "the replay of a pass gives other losses or gradients"
                if size not in replay.wrong_sizes:
                    yield replay
        if reason is not None and self.reason is None:
            self._warn(reason)

    def _row_program(self, weights: list[Tensor], batch: Tensors) -> Replay | None:
        assert self.make_row_pass is not None
        rows, size = batch[0].shape[:2]
        try:
            graph, slots = self._record(weights, batch, (ROWS, size), FORMS)
        except CannotRecordError:
            self._formless.add(self._keys(rows, size, batch, 2)[1])
            raise
        row_pass = self.make_row_pass(graph, slots)
        return None if row_pass is None else Replay(row_pass, slots)

    def _joint(self, weights: list[Tensor], batch: Tensors) -> Replay:
        one, other = (self._record(weights, batch, shape) for shape in SHAPES)
        return self._replay(one, other, len(weights))

    def _of_shape(self, weights: list[Tensor], batch: Tensors) -> Replay:
        recording = self._record(weights, batch)
        return self._replay(recording, recording, len(weights))

    def _replay(self, one: Recording, other: Recording, batch: int) -> Replay:
        if one.slots != other.slots:
            raise CannotRecordError("the number of samples changes which parameters have a gradient")
        segments = [self.layout.segments[i] for i in one.slots]
        strides = [(1,), *((s.length, *s.stride) for s in segments)]
        return Replay(joint_function(one.graph, other.graph, self.product_of, strides, batch), one.slots)

    def _record(
        self, weights: list[Tensor], batch: Tensors, shape: Shape | None = None, forms: Forms = NO_FORMS
    ) -> Recording:
        """Return the recording of a pass, at its own shape or another. Raises CannotRecordError if the pass cannot be
        recorded, and the error of the plain pass if that raises too."""
        old_state = python_state(self.module)
        some_weights, some = (weights, batch) if shape is None else self._resized(weights, batch, *shape)
        try:
            recording = record_pass(self.plain, some_weights, *some, forms=forms)
        except CannotRecordError:
            raise
        except Exception as error:
            reason = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        else:
            change = difference(old_state, python_state(self.module))
            if change is None:
                return recording
            reason = f"the model's forward pass changes {change}"
            self._end(reason)
            raise CannotRecordError(reason)
        run_plain(self.plain, weights, batch)  # the error is the batch's own if it comes here, too
        raise CannotRecordError(reason)

    def _resized(self, weights: list[Tensor], batch: Tensors, rows: int, size: int) -> tuple[list[Tensor], Tensors]:
        """Return `rows` rows of `size` samples, from the first on, repeated if there are fewer."""
        of_rows, of_samples = ([i % n for i in range(m)] for m, n in zip((rows, size), batch[0].shape, strict=False))
        views = self.layout.views(weights[0].new_zeros(rows, self.layout.row_size))
        for view, weight in zip(views, weights, strict=True):
            view.copy_(weight.detach()[of_rows])
        return views, tuple(t[of_rows][:, of_samples].contiguous() for t in batch)

    # --- what is compared ---

    def _compared(self, replay: Replay, weights: list[Tensor], batch: Tensors) -> PassResult | None:
        """Return the results of a pass if they agree with the plain pass. Else the size of the batch is a wrong one,
        unless no row is finite, which shows nothing.

        The plain pass has the same rows. With fewer rows cuDNN chooses other algorithms, which round differently, and a
        maximum that rounding moves changes the gradients.
        """
        rows, size = batch[0].shape[:2]
        expected = run_plain(self.plain, weights, batch)
        finite = torch.stack([t.isfinite()[..., None].flatten(1).all(1) for t in (expected[0], *expected[1])]).all(0)
        if not bool(finite.any()):
            return None
        try:
            result = replay.run(weights, batch)
        except RuntimeError as error:  # the model has no such operation for this size
            log.debug("executor vmap: a recorded step does not serve batches of %s samples: %s", size, error)
        else:
            if replay.slots == expected[2] and agree(*_part(expected, finite), *_part(result, finite)):
                replay.count, replay.rows[size] = replay.count + 1, rows
                return result
        replay.wrong_sizes.add(size)
        if replay.rows.get(size) == rows:  # it was right before
            self._end("the model's forward pass is not a function of its inputs and weights")
        return None

    def _end(self, reason: str) -> None:
        """End all replays."""
        self.reason = reason
        self._warn(reason)

    def _warn(self, reason: str) -> None:
        """Log, once for each reason, that passes are not replayed."""
        if reason not in self._warned_reasons:
            self._warned_reasons.add(reason)
            log.warning(
                "executor vmap: steps run through torch.vmap each time, which is slower, not replayed: %s", reason
            )


def _part(result: PassResult, mask: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Return the losses and gradients of some rows."""
    return result[0][mask], [g[mask] for g in result[1]]


def agree(
    losses: Tensor,
    grads: Sequence[Tensor],
    other_losses: Tensor,
    other_grads: Sequence[Tensor],
    tolerance: float = _GRADIENT,
    loss_tolerance: float | None = None,
) -> bool:
    """Return True if losses `[rows]` and gradients agree to rounding, or overflow, which shows nothing.

    `tolerance` bounds the relative error of the norm of all gradients. `loss_tolerance` bounds the relative error of a
    loss; None takes the bound of its dtype.
    """
    norm = torch.stack([g.double().square().sum() for g in grads]).sum().sqrt() if grads else torch.zeros(())
    squares = torch.stack([(a - b).double().square().sum() for a, b in zip(grads, other_grads, strict=True)] or [norm])
    if not bool(norm.isfinite() & losses.isfinite().all()):
        return True
    loss_tolerance = _LOSS[losses.dtype] if loss_tolerance is None else loss_tolerance
    differs = ((losses - other_losses).abs() > loss_tolerance * losses.abs().clamp_min(1e-3)).any()
    return not bool(differs) and bool(squares.sum().sqrt() <= tolerance * norm)
