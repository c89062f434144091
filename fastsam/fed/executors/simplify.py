"""Passes over the graph of a recorded forward and backward pass: fewer and cheaper operations for the same numbers, to
rounding.

A graph is functional: nothing writes in place. Each node has its value of the recording in `meta["val"]`. A pass proves
its change from layouts of these values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

aten = torch.ops.aten

_COPIES = (aten.clone.default, aten._to_copy.default)
_CHANNELS = 8  # channels from which on pooling in channels_last is faster

# Functions with the arguments and results of an operation, at half the cost of a call through `torch.ops`.
_DIRECT_FUNCTIONS: dict[Any, Any] = {
    getattr(getattr(aten, name), overload): getattr(torch, name)
    for names, overload in (
        ("bmm baddbmm relu tanh sigmoid exp log _log_softmax", "default"),
        ("add sub mul div", "Tensor"),
        ("ne", "Scalar"),
        ("transpose", "int"),
        ("mean", "dim"),
        ("sum", "dim_IntList"),
    )
    for name in names.split()
}
_DIRECT_FUNCTIONS |= {getattr(aten, name).default: getattr(Tensor, name) for name in ("view", "unsqueeze", "expand")}
_DIRECT_FUNCTIONS[aten._unsafe_view.default] = Tensor.view


def simplify(graph: Graph) -> None:
    """Apply the passes that keep the graph one of torch's own operations. Afterwards the values are right again."""
    shorten_views(graph)
    turn_products(graph)
    fuse_biases(graph)
    evaluate(graph)
    shorten_views(graph)


@torch.no_grad()
def evaluate(graph: Graph) -> None:
    """Compute all values again, because a changed operation gives other strides."""
    for node in calls(graph):
        args, kwargs = map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
        node.meta["val"] = cast("Callable[..., Any]", node.target)(*args, **kwargs)


def shorten_views(graph: Graph) -> None:
    """Leave out operations whose result is an earlier tensor (`detach`, `expand` to the same shape, transposed and
    back, a copy in the same order), and operations whose results are not read."""
    nodes: dict[tuple[object, ...], Node] = {}
    for node in graph.nodes:
        if not isinstance(node.meta.get("val"), Tensor):
            continue
        layout = layout_of(node)
        sources = node.all_input_nodes if node.target in _COPIES else []  # none of a number
        replacement = next((n for n in sources if layout_of(n) == layout), None)
        replacement = replacement or nodes.setdefault((memory(node), *layout), node)
        if replacement is not node and node.op == "call_function":
            _replace(node, replacement)
    graph.eliminate_dead_code()


def turn_products(graph: Graph) -> None:
    """Replace a product of matrices that is only read transposed, with or without a bias, by the product of the
    transposed matrices. The result then has the order in memory in which it is read, and gradients of weights have the
    order of the weights.
    """
    for node in reversed(calls(graph)):  # a sum before its product
        if not node.users or not all(map(_is_transpose, node.users)):
            continue
        with graph.inserting_before(node):
            if node.target is aten.bmm.default:
                product = call(graph, aten.bmm.default, *(_transpose(graph, n) for n in reversed(arguments(node))))
            elif node.target is aten.add.Tensor and not node.kwargs and _has_product(arguments(node)):
                product = call(graph, aten.add.Tensor, *(_transpose(graph, n) for n in arguments(node)))
            else:
                continue
        for user in list(node.users):
            _replace(user, product)
        graph.erase_node(node)


def fuse_biases(graph: Graph) -> None:
    """Compute `bias + bmm(a, b)` in one call if nothing else reads the product."""
    for node in calls(graph):
        if node.target is not aten.add.Tensor or node.kwargs or not all(isinstance(n, Node) for n in arguments(node)):
            continue
        for bias, product in (arguments(node), arguments(node)[::-1]):
            is_whole = node.meta["val"].shape == product.meta["val"].shape and len(product.users) == 1
            if is_whole and _is_product(product) and bias.meta["val"].dtype == product.meta["val"].dtype:
                node.target, node.args = aten.baddbmm.default, (bias, *arguments(product))
                graph.erase_node(product)
                break


# --- a graph that is run as it is ---


def function_of(graph: Graph, strides: Sequence[tuple[int, ...]]) -> Callable[..., Sequence[Tensor]]:
    """Return the graph as a function whose results have these strides. The nodes lose their values."""
    for node in calls(graph):
        if node.target is aten.max_pool2d_with_indices.default and _has_channels(arguments(node)[0].meta["val"]):
            node.target = pool_images
    _place_outputs(graph, strides)
    for node in calls(graph):
        node.target = _DIRECT_FUNCTIONS.get(node.target, node.target)
    for node in graph.nodes:
        node.meta.clear()  # tensors as they were
    run: Callable[..., Sequence[Tensor]] = module_of(graph).forward
    return run


def _has_channels(x: Tensor) -> bool:
    """Return True for contiguous images on a CPU that `pool_images` pools faster than torch."""
    is_full = x.dim() == 4 and x.shape[1] >= _CHANNELS and x.is_contiguous()
    return is_full and x.device.type == "cpu" and x.dtype in (torch.float32, torch.float64)


def pool_images(x: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    """Return the maxima and their places as `max_pool2d_with_indices` does. Maxima are not rounded, so the bits are the
    same, and torch's loop over channels is three times as fast as its loop over images, copies included."""
    maxima, places = aten.max_pool2d_with_indices.default(x.contiguous(memory_format=torch.channels_last), *options)
    return maxima.contiguous(), places.contiguous()


def _place_outputs(graph: Graph, strides: Sequence[tuple[int, ...]]) -> None:
    """Give the outputs these strides, and memory that neither inputs nor the model share, because others write
    there."""
    output = graph.output_node()
    inputs = {memory(n) for n in graph.nodes if n.op in ("placeholder", "get_attr") and "val" in n.meta}
    new_outputs = []
    with graph.inserting_before(output):
        for node, stride in zip(outputs(graph), strides, strict=True):
            fits = node.meta["val"].stride() == stride and memory(node) not in inputs
            new_outputs.append(node if fits else graph.call_function(copy_with_strides, (node, stride)))
    output.args = (tuple(new_outputs),)


def copy_with_strides(t: Tensor, strides: tuple[int, ...]) -> Tensor:
    """Return a copy of `t` with these strides."""
    return torch.empty_strided(t.shape, strides, dtype=t.dtype, device=t.device).copy_(t)


def module_of(graph: Graph) -> GraphModule:
    """Return the module that runs a recorded graph. Its code is made now."""
    assert graph.owning_module is not None
    return GraphModule(graph.owning_module, graph)


# --- nodes ---


def calls(graph: Graph) -> list[Node]:
    """Return the operations of a graph."""
    return [n for n in graph.nodes if n.op == "call_function"]


def arguments(node: Node) -> tuple[Any, ...]:
    """Return the arguments of an operation."""
    return node.args


def outputs(graph: Graph) -> list[Node]:
    """Return the results of a graph with several results."""
    return list(arguments(graph.output_node())[0])


def memory(node: Node) -> int:
    """Return a number for the memory of an evaluated node, equal for views of one memory."""
    value = node.meta.get("val")
    return int(value.untyped_storage()._cdata) if isinstance(value, Tensor) else id(node)


def layout_of(node: Node) -> tuple[object, ...]:
    """Return what two nodes share if one may stand for the other, values aside."""
    t = node.meta["val"]
    return (t.storage_offset(), t.shape, t.stride(), t.dtype, t.is_conj(), t.is_neg())


def call(graph: Graph, op: Any, *args: Any) -> Node:
    """Return a new node, evaluated."""
    node = graph.call_function(op, args)
    with torch.no_grad():
        node.meta["val"] = op(*map_arg(args, lambda n: n.meta["val"]))
    return node


def _replace(node: Node, replacement: Node) -> None:
    node.replace_all_uses_with(replacement)
    node.graph.erase_node(node)


def _is_product(node: object) -> bool:
    return isinstance(node, Node) and node.target is aten.bmm.default


def _is_transpose(node: Node) -> bool:
    is_stacked = node.target is aten.transpose.int and node.meta["val"].dim() == 3
    return is_stacked and {d % 3 for d in arguments(node)[1:]} == {1, 2}


def _has_product(args: Sequence[Any]) -> bool:
    """Return True if one of the added stacked matrices is a product that nothing else reads."""
    is_stacked = all(isinstance(n, Node) and n.meta["val"].dim() == 3 for n in args)
    return is_stacked and any(_is_product(n) and len(n.users) == 1 for n in args)


def _transpose(graph: Graph, node: Node) -> Node:
    return arguments(node)[0] if _is_transpose(node) else call(graph, aten.transpose.int, node, 1, 2)
