"""A recording of one pass of stacked clients as a graph of torch's operations, below autograd and vmap, and a check of
the Python state that it may have changed."""

from __future__ import annotations

import operator
import random
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functionalize
from torch.fx import Node

from fastsam.fed.executors import graph_passes
from fastsam.fed.executors.graph_recorder import CannotRecordError, module_of, record

ROWS = 2  # rows of a recording for a row program, whose rows must not depend on their number
_PLAIN = (int, float, complex, str, bytes, bool, type(None))


class Recording:
    """A recording of `plain` at weights and a batch. It stops at an operation of `stops`, and has the
    functions of `forms` in place of operations.

    Attributes:
        graph: its functional, evaluated graph (see `graph_passes`), from weights and batch to losses and existing
            gradients.
        slots: indices of the parameters with gradients.
        inputs: inputs of the recording.
        outputs: its results.

    Raises:
        CannotRecordError: it cannot be recorded.
    """

    def __init__(
        self,
        plain: Callable[..., tuple[Tensor, Sequence[Tensor | None]]],
        weights: Sequence[Tensor],
        *batch: Tensor,
        stops: frozenset[Any] = frozenset(),
        forms: Mapping[Any, Any] = MappingProxyType({}),
    ) -> None:
        self.slots: tuple[int, ...] = ()

        def flat(*tensors: Tensor) -> tuple[Tensor, ...]:
            parameters, inputs = tensors[: len(weights)], tensors[len(weights) :]
            losses, grads = plain([w.detach().requires_grad_() for w in parameters], *inputs)
            self.slots = tuple(i for i, g in enumerate(grads) if g is not None)
            return (losses, *(g for g in grads if g is not None))

        self.inputs = [*(w.detach() for w in weights), *(t.clone() for t in batch)]  # which the model may write
        self.graph = record(flat, self.inputs, stops, forms)
        if any(map(_writes, self.graph.nodes)):
            with torch.no_grad():
                self.graph = record(functionalize(module_of(self.graph)), self.inputs)
        graph_passes.note_causes(self.graph)
        if graph_passes.drop_ones(self.graph):
            graph_passes.propagate_values(self.graph)
        self._check()
        self.outputs: list[Tensor] = [node.meta["val"] for node in graph_passes.outputs(self.graph)]

    def _check(self) -> None:
        nodes = self.graph.nodes
        for node in nodes:
            is_known = isinstance(node.target, torch._ops.OpOverload) or node.target is operator.getitem
            if node.op == "call_function" and not is_known:
                raise CannotRecordError(f"it calls {node.target}, which is not an operation on tensors")
            if node.op == "call_function" and _draws(node):
                raise CannotRecordError(f"it draws random numbers ({node.target})")
            if _writes(node):
                raise CannotRecordError(f"it writes into memory that is read elsewhere ({node.target})")
        inputs = {graph_passes.memory(n) for n in nodes if n.op == "placeholder"}
        attributes = [n for n in nodes if n.op == "get_attr"]
        if any(graph_passes.memory(n) in inputs for n in attributes):
            raise CannotRecordError("it reads the memory of weights or batches by another way than its inputs")
        if any(n in attributes for n in graph_passes.outputs(self.graph)):
            raise CannotRecordError("its losses or gradients come from operations that were not recorded")


def _draws(node: Node) -> bool:
    """Return True for an operation that draws random numbers. Attention without dropout draws none."""
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    values = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    return "dropout_p" not in names or values.get("dropout_p", 0.0) != 0


def _writes(node: Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def python_state(module: nn.Module) -> dict[str, object]:
    """Return Python's side of a model, as far as it can be compared (numbers, words, lengths, which tensors), and the
    random generators."""
    state: dict[str, object] = {
        f"{name}.{key}".lstrip("."): comparable(value)
        for name, inner in module.named_modules()
        for mapping in (inner.__dict__, inner._buffers)
        for key, value in mapping.items()
    }
    state["Python's random numbers"] = random.getstate()
    state["numpy's random numbers"] = [comparable(v) for v in np.random.get_state()]
    return state


def comparable(value: object) -> object:
    """Return a value that differs if the object has changed: a number, a text, a length, an identity or a version."""
    if isinstance(value, _PLAIN):
        return (type(value), repr(value))
    if isinstance(value, Tensor):
        return (id(value), value._version)
    if isinstance(value, np.ndarray):
        return value.tobytes()
    if isinstance(value, (list, tuple)):
        return [comparable(v) if isinstance(v, _PLAIN) else id(v) for v in value]
    if isinstance(value, (nn.Module, torch.ScriptObject)):  # the length of a scripted module raises
        return id(value)
    return (id(value), len(value)) if hasattr(value, "__len__") else id(value)


def difference(old_state: dict[str, object], new_state: dict[str, object]) -> str | None:
    """Return a description of the first difference, or None."""
    names = sorted(k for k in old_state.keys() | new_state.keys() if old_state.get(k) != new_state.get(k))
    return ", ".join(names[:3]) if names else None
