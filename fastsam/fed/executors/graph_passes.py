"""Passes over the graph of a recorded forward and backward pass: fewer and cheaper operations for the same numbers, to
rounding.

A graph is functional: nothing writes in place. Each node has its value of the evaluation in `meta["val"]`. A pass
proves its change from these values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from fastsam.fed.executors.graph_recorder import module_of

aten = torch.ops.aten

ProductOf = Callable[[Tensor, Tensor], Any]

VIEWS = frozenset(
    {
        aten.view.default, aten.transpose.int, aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.default,
        aten.squeeze.dims,
        aten.expand.default, aten.t.default, aten.permute.default, aten.select.int, aten.slice.Tensor,
        aten.detach.default,
        aten.alias.default,
    }
)  # fmt: skip
_RESHAPES = frozenset({aten.view.default, aten._unsafe_view.default, aten.reshape.default})
_SCALINGS = frozenset({aten.mul.Scalar, aten.mul.Tensor, aten.div.Scalar, aten.div.Tensor})
_FACTORIES = frozenset(
    {aten.ones_like.default, aten.zeros_like.default, aten.full_like.default, aten.ones.default, aten.zeros.default}
)
_CHANNELS = 8  # channels from which on pooling in channels_last is faster
_MAX_CONSTANT = 4096  # elements of a constant that is kept instead of made

# Functions with the arguments and results of an operation, at half the cost of a call through
# `torch.ops`.
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
_METHODS: dict[Any, str] = {
    aten.view.default: "view",
    aten.unsqueeze.default: "unsqueeze",
    aten.expand.default: "expand",
}


@torch.no_grad()
def propagate_values(graph: Graph) -> None:
    """Evaluate views, changed operations, and operations whose operands have changed their layout in memory.

    The passes read only layouts, and a value with an unchanged layout stays. So most operations are not run again.
    """
    for node in _calls(graph):
        args, kwargs = map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
        cause = _cause_of(node, args, kwargs)
        is_view, function = _is_view(node), cast("Callable[..., Any]", node.target)
        if cause == node.meta.get("cause") and not is_view:
            continue
        node.meta["cause"] = cause
        value, old = function(*args, **kwargs), node.meta.get("val")
        if old is None or is_view or _layouts(value) != _layouts(old):
            node.meta["val"] = value


def note_causes(graph: Graph) -> None:
    """Note for every evaluated operation what its layout comes from (see `propagate_values`)."""
    for node in _calls(graph):
        node.meta["cause"] = _cause_of(node, *map_arg((node.args, node.kwargs), lambda n: n.meta["val"]))


def _cause_of(node: Node, args: Any, kwargs: Any) -> tuple[Any, ...]:
    """Return what the layout of a value depends on."""
    return node.target, _layouts(args), _layouts(kwargs)


def _layouts(x: Any) -> Any:
    """Return arguments or results with layouts in place of tensors."""
    if isinstance(x, Tensor):
        return layout_of(x)
    if isinstance(x, dict):
        return {name: _layouts(item) for name, item in x.items()}
    return [_layouts(item) for item in x] if isinstance(x, (list, tuple)) else x


def _is_view(node: Node) -> bool:
    """Return True if the value may share the memory of an operand."""
    schema = getattr(node.target, "_schema", None)
    return schema is None or node.target in _RESHAPES or any(r.alias_info is not None for r in schema.returns)


def simplify(graph: Graph, folds: bool = True) -> None:
    """Apply the passes that keep the graph one of torch's own operations. It stays evaluated. `folds` keeps values that
    depend only on shapes."""
    if folds:
        fold_constants(graph)
    shorten_views(graph)
    for change in (turn_products, fuse_biases):  # other strides
        if change(graph):
            propagate_values(graph)
            shorten_views(graph)
    graph.eliminate_dead_code()


def fold_constants(graph: Graph) -> None:
    """Keep values that depend only on shapes (the seed of the backward pass): a node "get_attr" with
    `meta["constant"]`. A node with `meta["varies"]` serves several shapes."""
    count, module = 0, graph.owning_module
    assert module is not None
    for node in _calls(graph):
        sources, value = node.all_input_nodes, node.meta["val"]
        is_constant = node.target in _FACTORIES or (bool(sources) and all("constant" in n.meta for n in sources))
        if not is_constant or "varies" in node.meta or not isinstance(value, Tensor) or value.numel() > _MAX_CONSTANT:
            continue
        module.register_buffer(f"constant_{count}", value)
        with graph.inserting_before(node):
            attribute = graph.get_attr(f"constant_{count}")
        attribute.meta |= {"val": value, "constant": True}
        _replace(node, attribute)
        count += 1


def drop_ones(graph: Graph) -> bool:
    """Leave out multiplications by one, and return True if the graph changed."""
    is_changed = False
    for node in _calls(graph):
        if node.target not in _SCALINGS or type(arguments(node)[1]) not in (int, float) or arguments(node)[1] != 1:
            continue
        if node.meta["val"].dtype == arguments(node)[0].meta["val"].dtype:
            for user in node.users:
                user.target = aten.reshape.default if user.target in _RESHAPES else user.target
            _replace(node, arguments(node)[0])
            is_changed = True
    return is_changed


def shorten_views(graph: Graph) -> None:
    """Leave out operations whose result is an earlier tensor (`detach`, `expand` to the same shape, transposed and
    back, a copy in the same order). Make one view of contiguous memory of a chain of views."""
    for node in _calls(graph):
        if not isinstance(node.meta["val"], Tensor):
            continue
        sources = _sources(node)
        if node.target in (aten.clone.default, aten._to_copy.default):
            sources = [n for n in node.all_input_nodes if _geometry(n) == _geometry(node)]  # none of a number
        replacement = next((n for n in sources if _geometry(n) == _geometry(node)), None)
        if replacement is None and node.target in (*_RESHAPES, aten.expand.default):
            replacement = _one_view(graph, node, sources)
        if replacement is not None:
            _replace(node, replacement)
        elif node.target is aten.reshape.default and sources:
            node.target = aten.view.default


def turn_products(graph: Graph) -> bool:
    """Replace a product of matrices that is only read transposed, with or without a bias, by the product of the
    transposed matrices, and return True if the graph changed. The result then has the order in memory in which it is
    read, and gradients of weights have the order of the weights.
    """
    is_changed = False
    for node in reversed(_calls(graph)):  # a sum before its product
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
        is_changed = True
    return is_changed


def fuse_biases(graph: Graph) -> bool:
    """Compute `bias + bmm(a, b)` in one call if nothing else reads the product."""
    is_changed = False
    for node in _calls(graph):
        if node.target is not aten.add.Tensor or node.kwargs or not all(isinstance(n, Node) for n in arguments(node)):
            continue
        for bias, product in (arguments(node), arguments(node)[::-1]):
            is_whole = node.meta["val"].shape == product.meta["val"].shape and len(product.users) == 1
            if is_whole and _is_product(product) and bias.meta["val"].dtype == product.meta["val"].dtype:
                node.target, node.args = aten.baddbmm.default, (bias, *arguments(product))
                graph.erase_node(product)
                is_changed = True
                break
    return is_changed


def function_of(graph: Graph, strides: Sequence[tuple[int, ...]]) -> Callable[..., Sequence[Tensor]]:
    """Return the graph as a function whose results have these strides. The nodes lose their values."""
    use_quick_pools(graph)
    place_outputs(graph, strides)
    bind_functions(graph)
    for node in graph.nodes:
        node.meta.clear()  # tensors as they were
    run: Callable[..., Sequence[Tensor]] = module_of(graph).forward
    return run


def use_products(graph: Graph, product_of: ProductOf) -> None:
    """Replace products of matrices, with or without a bias, by the functions of `product_of` (`f(a, b, bias)`; None for
    torch's)."""
    for node in _calls(graph):
        if node.target not in (aten.bmm.default, aten.baddbmm.default) or node.kwargs:
            continue
        *bias, a, b = arguments(node)
        product = product_of(a.meta["val"], b.meta["val"])
        if product is not None:
            node.target, node.args = product, (a, b, *(bias or [None]))


def use_quick_pools(graph: Graph) -> None:
    """Replace maximum pooling of contiguous images on a CPU by `pool_images`."""
    for node in _calls(graph):
        if node.target is aten.max_pool2d_with_indices.default:
            x = arguments(node)[0].meta["val"]
            is_full = x.dim() == 4 and x.shape[1] >= _CHANNELS and x.is_contiguous()
            if is_full and x.device.type == "cpu" and x.dtype in (torch.float32, torch.float64):
                node.target = pool_images


def pool_images(x: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    """Return the maxima and their places as `max_pool2d_with_indices` does. Maxima are not rounded, so the bits are the
    same, and torch's loop over channels is three times as fast as its loop over images, copies included."""
    maxima, places = aten.max_pool2d_with_indices.default(x.contiguous(memory_format=torch.channels_last), *options)
    return maxima.contiguous(), places.contiguous()


def place_outputs(graph: Graph, strides: Sequence[tuple[int, ...]]) -> None:
    """Give the outputs these strides, and memory that neither inputs nor the model share, because others write
    there."""
    output = graph.output_node()
    inputs = {memory(n) for n in graph.nodes if n.op in ("placeholder", "get_attr") and "val" in n.meta}
    new_outputs = []
    with graph.inserting_before(output):
        for node, stride in zip(outputs(graph), strides, strict=True):
            fits = node.meta["val"].stride() == stride and memory(node) not in inputs
            new_outputs.append(node if fits else call(graph, copy_with_strides, node, stride))
    output.args = (tuple(new_outputs),)


def bind_functions(graph: Graph) -> None:
    """Call torch's functions and methods of tensors instead of its operations, for a graph that is run as it is."""
    for node in _calls(graph):
        if node.target in _DIRECT_FUNCTIONS:
            node.target = _DIRECT_FUNCTIONS[node.target]
        elif node.target in _METHODS:
            node.op, node.target = "call_method", _METHODS[node.target]


def copy_with_strides(t: Tensor, strides: tuple[int, ...]) -> Tensor:
    """Return a copy of `t` with these strides."""
    return torch.empty_strided(t.shape, strides, dtype=t.dtype, device=t.device).copy_(t)


def arguments(node: Node) -> tuple[Any, ...]:
    """Return the arguments of an operation."""
    return node.args


def outputs(graph: Graph) -> list[Node]:
    """Return the results of a graph with several results."""
    return list(arguments(graph.output_node())[0])


def memory(node: Node) -> int:
    """Return a number for the memory of an evaluated node, equal for views of one memory."""
    return int(node.meta["val"].untyped_storage()._cdata)


def call(graph: Graph, op: Any, *args: Any) -> Node:
    """Return a new node, evaluated."""
    node = graph.call_function(op, args)
    with torch.no_grad():
        node.meta["val"] = op(*map_arg(args, lambda n: n.meta["val"]))
    return node


def _calls(graph: Graph) -> list[Node]:
    return [n for n in graph.nodes if n.op == "call_function"]


def _replace(node: Node, replacement: Node) -> None:
    node.replace_all_uses_with(replacement)
    node.graph.erase_node(node)


def _sources(node: Node) -> list[Node]:
    """Return the sources of a view, the farthest first."""
    nodes: list[Node] = []
    while node.target in VIEWS or (node.target in _RESHAPES and memory(node) == memory(arguments(node)[0])):
        node = arguments(node)[0]
        nodes.append(node)
    return nodes[::-1]


def _geometry(node: Node) -> tuple[object, ...]:
    return layout_of(node.meta["val"])


def layout_of(t: Tensor) -> tuple[object, ...]:
    """Return what two tensors share if one may stand for the other, values aside."""
    return (t.storage_offset(), t.shape, t.stride(), t.dtype, t.is_conj(), t.is_neg())


def _one_view(graph: Graph, node: Node, sources: Sequence[Node]) -> Node | None:
    """Return a view of the farthest contiguous source with the same elements."""
    value = node.meta["val"]
    for source in sources if value.is_contiguous() else ():
        t, is_one_view = source.meta["val"], source is arguments(node)[0] and node.target is aten.view.default
        if t.is_contiguous() and t.numel() == value.numel() and not is_one_view:
            with graph.inserting_before(node):
                return call(graph, aten.view.default, source, list(value.shape))
    return None


def _is_product(node: object) -> bool:
    return isinstance(node, Node) and node.target is aten.bmm.default


def _is_transpose(node: Node) -> bool:
    return (
        node.target is aten.transpose.int
        and node.meta["val"].dim() == 3
        and {d % 3 for d in arguments(node)[1:]} == {1, 2}
    )


def _has_product(args: Sequence[Any]) -> bool:
    """Return True if one of the added stacked matrices is a product that nothing else reads."""
    is_stacked = all(isinstance(n, Node) and n.meta["val"].dim() == 3 for n in args)
    return is_stacked and any(_is_product(n) and len(n.users) == 1 for n in args)


def _transpose(graph: Graph, node: Node) -> Node:
    return arguments(node)[0] if _is_transpose(node) else call(graph, aten.transpose.int, node, 1, 2)
