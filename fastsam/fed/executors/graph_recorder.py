"""A recorder of torch's operations, below autograd and vmap, as a graph.

torch's `make_fx` records the same operations. It takes four times as long, because it also computes metadata of every
operation.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

aten = torch.ops.aten


class CannotRecordError(RuntimeError):
    """The pass cannot be replayed as a graph of operations; the message says why."""


class StoppedRecordingError(CannotRecordError):
    """The recording was stopped at an operation with which it is of no use."""


class GraphRecorder(TorchDispatchMode):
    """A mode that runs every operation and adds it to a graph. A node has its value in `meta["val"]`.

    A tensor that comes from no recorded operation is an attribute of the module. The recording stops at an operation of
    `stops`.
    """

    def __init__(self, inputs: Sequence[Tensor], stops: frozenset[Any] = frozenset()) -> None:
        super().__init__()
        self.graph, self.root, self.stops = Graph(), nn.Module(), stops
        self._nodes: dict[int, Node] = {}  # by the id of the tensor
        self._tensors: list[Tensor] = []  # kept alive, because an id may be used again
        for i, x in enumerate(inputs):
            self._keep(self.graph.placeholder(f"input_{i}"), x)

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in self.stops:
            raise StoppedRecordingError(f"it calls {func}")
        if torch.Tag.data_dependent_output in func.tags:
            raise CannotRecordError(f"it reads the value of a tensor ({func})")
        target = func
        if func is aten.lift_fresh.default:  # a tensor that the model made from numbers, into which it may write
            self._add_attribute(args[0], args[0].detach().clone())
            target = aten.lift_fresh_copy.default
        node_args, node_kwargs = tree_map_only(Tensor, self._node_of, (tuple(args), dict(kwargs)))
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

    def _node_of(self, x: Tensor) -> Node:
        """Return the node whose value is x: of an operation, or of an attribute."""
        if id(x) not in self._nodes:
            self._add_attribute(x, x.detach())
        return self._nodes[id(x)]

    def _add_attribute(self, x: Tensor, value: Tensor) -> None:
        name = f"tensor_{len(self._tensors)}"
        self.root.register_buffer(name, value)
        self._keep(self.graph.get_attr(name), x)

    def module(self, outputs: Sequence[Tensor]) -> GraphModule:
        """Return the graph that ends with these tensors."""
        self.graph.output(tuple(self._node_of(x) for x in outputs))
        return GraphModule(self.root, self.graph)


def record(
    function: Callable[..., Sequence[Tensor]], inputs: Sequence[Tensor], stops: frozenset[Any] = frozenset()
) -> GraphModule:
    """Return the graph of `function(*inputs)`, evaluated at the inputs.

    Raises CannotRecordError if the function reads the value of a tensor, or calls an operation of `stops`.
    """
    recorder = GraphRecorder(inputs, stops)
    with recorder:
        outputs = function(*inputs)
    return recorder.module(outputs)
