"""Lookups in tables of a recorded pass, row by row.

`torch.vmap` joins the tables of all rows to one, and adds the place of a row's table to its indices. A row program
reads a row's own table by its indices as they are, and checks them.
"""

from __future__ import annotations

from torch.fx import Graph, Node

from fastsam.fed.executors.rowprograms.memory_plan import ROWS, root
from fastsam.fed.executors.simplify import arguments, aten
from fastsam.fed.executors.stacked_lookups import OUTSIDE

_IN_ORDER = (aten.view.default, aten._unsafe_view.default, aten.clone.default)


def separate_lookups(graph: Graph) -> None:
    """Let lookups have the rows' own tables `[rows, count, size]` and indices, and their gradients too."""
    for node in graph.nodes:
        if node.target is aten.embedding.default:
            _separate(node)
        elif node.target is aten.embedding_dense_backward.default:
            _separate_gradient(node)
        elif node.target is aten.where.self and arguments(node)[1] is arguments(node)[2]:  # padding, or not
            entries = arguments(node)[1]
            if entries.target is aten.embedding.default and entries.meta["val"].shape == node.meta["val"].shape:
                entries.meta["val"] = node.meta["val"]  # views of the node have its memory
                node.replace_all_uses_with(entries)
    graph.eliminate_dead_code()


def _separate(node: Node) -> None:
    table, joint = arguments(node)[:2]
    (total, size), indices = table.meta["val"].shape, _indices(joint)
    while table.target in _IN_ORDER and indices is not None:
        table = arguments(table)[0]
        if table.meta["val"].shape == (ROWS, total // ROWS, size):
            node.args = (table, indices)


def _separate_gradient(node: Node) -> None:
    g, joint, total, *options = arguments(node)
    count, padding, indices, views = total // ROWS, -1, _indices(joint), list(node.users)
    if g.target is aten.where.self:
        condition, zero, inner = arguments(g)
        is_padding = root(condition)
        if is_padding.target is aten.eq.Scalar and arguments(is_padding)[0] is indices and _is_number(zero, 0):
            g, padding = inner, arguments(is_padding)[1]
    is_split = all(view.meta["val"].shape == (ROWS, count, node.meta["val"].shape[1]) for view in views)
    if indices is not None and options == [-1, False] and is_split:
        node.args, node.meta["val"] = (g, indices, count, padding), views[0].meta["val"]
        for view in views:
            view.replace_all_uses_with(node)


def _indices(joint: Node) -> Node | None:
    """Return a row's indices, from which `stacked_lookups` and vmap made indices in the joint table, or None."""
    checked = arguments(joint)[0] if joint.target is aten.add.Tensor else None
    if not isinstance(checked, Node) or checked.target is not aten.where.self:
        return None
    _, indices, outside = arguments(checked)
    return indices if _is_number(outside, OUTSIDE) else None


def _is_number(node: Node, number: int) -> bool:
    return node.target is aten.scalar_tensor.default and arguments(node)[0] == number
