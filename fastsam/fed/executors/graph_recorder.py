"""A recorder of torch's operations, below autograd and vmap, as a graph.

torch's `make_fx` records the same operations. It takes four times as long, because it also computes metadata of every
operation.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten


class CannotRecordError(RuntimeError):
    """The pass cannot be replayed as a graph of operations; the message says why."""


class StoppedRecordingError(CannotRecordError):
    """The recording was stopped at an operation with which it is of no use."""


class GraphRecorder(TorchDispatchMode):
    """A mode that runs every operation and adds it to a graph. A node has its value in `meta["val"]`.

    A tensor that comes from no recorded operation is an attribute of the module. The recording stops at an operation of
    `stops`. The functions in `forms` take the place of operations.
    """

    def __init__(
        self,
        inputs: Sequence[Tensor],
        stops: frozenset[Any] = frozenset(),
        forms: Mapping[Any, Any] = MappingProxyType({}),
    ) -> None:
        super().__init__()
        self.graph, self.root, self.stops, self.forms = Graph(), nn.Module(), stops, forms
        self._nodes: dict[int, Node] = {}  # by the id of the tensor
        self._tensors: list[Tensor] = []  # kept alive, because an id may be used again
        for i, x in enumerate(inputs):
            self._keep(self.graph.placeholder(f"input_{i}"), x)

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in self.forms:
            with self:
                return self.forms[func](*args, **kwargs)
        if func in self.stops:
            raise StoppedRecordingError(f"it calls {func}")
        if torch.Tag.data_dependent_output in func.tags:
            raise CannotRecordError(f"it reads the value of a tensor ({func})")
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
            return [self._node_of(item) if isinstance(item, Tensor) else item for item in x]
        return self._node_of(x) if isinstance(x, Tensor) else x

    def _node_of(self, x: Tensor) -> Node:
        """Return the node whose value is x: of an operation, or of an attribute."""
        if id(x) not in self._nodes:
            self._add_attribute(x, x.detach())
        return self._nodes[id(x)]

    def _add_attribute(self, x: Tensor, value: Tensor) -> None:
        name = f"tensor_{len(self._tensors)}"
        self.root.register_buffer(name, value)
        self._keep(self.graph.get_attr(name), x)

    def end(self, outputs: Sequence[Tensor]) -> Graph:
        """Return the graph that ends with these tensors."""
        self.graph.output(tuple(self._node_of(x) for x in outputs))
        self.graph.owning_module = self.root  # type: ignore[assignment]
        return self.graph


def record(
    function: Callable[..., Sequence[Tensor]],
    inputs: Sequence[Tensor],
    stops: frozenset[Any] = frozenset(),
    forms: Mapping[Any, Any] = MappingProxyType({}),
) -> Graph:
    """Return the graph of `function(*inputs)`, evaluated at the inputs. The module that owns it has its attributes.

    Raises CannotRecordError if the function reads the value of a tensor, or calls an operation of `stops`.
    """
    recorder = GraphRecorder(inputs, stops, forms)
    with recorder:
        outputs = function(*inputs)
    return recorder.end(outputs)


def module_of(graph: Graph) -> GraphModule:
    """Return the module that runs a recorded graph. Its code is made now."""
    assert graph.owning_module is not None
    return GraphModule(graph.owning_module, graph)
