"""A recorded pass as a straight line of tensor operations, recorded below autograd and vmap.

What torch does per operation above the kernels (mapping over rows, building and walking the autograd graph) is most of a pass of a small
model. None of it is left in what is recorded here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten

Recorded = tuple[Any, tuple[Any, ...], dict[str, Any], Any]  # operation, arguments, what came out


class CannotTraceError(RuntimeError):
    """The pass cannot be replayed as a straight line of operations; the message says why."""


class Value:
    """A tensor of the program. `call` made it (its output number `place`); an input or a tensor of the model has none.

    tensor: what it was when the pass was recorded; shape, strides and dtype stay what they are there. constant: it stays all of that.
    """

    def __init__(self, tensor: Tensor, call: Call | None = None, place: int = 0, constant: bool = False) -> None:
        self.tensor, self.call, self.place, self.constant = tensor, call, place, constant


class Call:
    """One operation: `args` and `kwargs` hold Values where there are tensors; `outs` None for outputs that are no tensors."""

    def __init__(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.op, self.args, self.kwargs = op, args, kwargs
        self.outs: list[Value | None] = []
        self.many = False

    def evaluate(self) -> None:
        """Runs the operation on what its arguments were."""
        args, kwargs = mapped((self.args, self.kwargs), lambda v: v.tensor if isinstance(v, Value) else v)
        made = self.op(*args, **kwargs)
        self.many = not isinstance(made, Tensor)
        outs = made if self.many else (made,)
        self.outs = [Value(t, self, i) if isinstance(t, Tensor) else None for i, t in enumerate(outs)]

    def values(self) -> Iterator[Value]:
        """What it reads."""
        return (v for v in leaves((self.args, self.kwargs)) if isinstance(v, Value))


def mapped(tree: Any, f: Callable[[Any], Any]) -> Any:
    """`tree` (tuples, lists, dicts) with `f` of every leaf."""
    if isinstance(tree, (tuple, list)):
        return type(tree)([mapped(t, f) for t in tree])
    if isinstance(tree, dict):
        return {k: mapped(t, f) for k, t in tree.items()}
    return f(tree)


def leaves(tree: Any) -> Iterator[Any]:
    if isinstance(tree, (tuple, list)):
        for t in tree:
            yield from leaves(t)
    elif isinstance(tree, dict):
        yield from leaves(tuple(tree.values()))
    else:
        yield tree


class Recorder(TorchDispatchMode):
    """Keeps every operation that runs inside, with its tensors: they stay alive, so that each is known by its identity."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Recorded] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not isinstance(func, torch._ops.OpOverload):
            raise CannotTraceError(f"it calls {func}, which is no operation on tensors")
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise CannotTraceError(f"it draws random numbers ({func})")
        out = func(*args, **kwargs)
        if not isinstance(out, (Tensor, tuple, list)):
            raise CannotTraceError(f"it looks at the values of tensors ({func})")
        self.calls.append((func, args, kwargs, out))
        return out


class Program:
    """Straight-line operations from `inputs` to `outputs`. Built call by call with `emit`, which gives equal calls one Value.

    turns: whether products that are read transposed become products of the transposed matrices; `turned` holds those that did.
    """

    def __init__(self, inputs: Sequence[Tensor], turns: bool = True) -> None:
        self.turns, self.turned = turns, list[Call]()
        self.inputs = [Value(t) for t in inputs]
        self.calls: list[Call] = []
        self.outputs: list[Value] = []
        self._known = {id(v.tensor): v for v in self.inputs}
        self._made: dict[Any, Call] = {}

    def value(self, tensor: Tensor) -> Value:
        """Of a tensor that was recorded; one that nothing made is a constant of the model, read where it lies in every run."""
        if id(tensor) not in self._known:
            self._known[id(tensor)] = Value(tensor)
        return self._known[id(tensor)]

    def held(self) -> list[Value]:
        """What no call makes: inputs, and tensors of the model."""
        return [v for v in self._known.values() if v.call is None]

    def name(self, tensor: Tensor, value: Value) -> None:
        """`tensor` of the recording is `value` from here on."""
        self._known[id(tensor)] = value

    def emit(self, op: Any, *args: Any, **kwargs: Any) -> Value:
        """The first output of an operation."""
        value = self.emit_all(op, args, kwargs).outs[0]
        assert value is not None  # operations whose first output is no tensor are not recorded
        return value

    def emit_all(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        key = _key((op, args, kwargs))
        if key not in self._made:
            call = self._made[key] = Call(op, args, kwargs)
            call.evaluate()
            self.calls.append(call)
        return self._made[key]

    def needed(self) -> list[Call]:
        """The calls that the outputs need, in their order."""
        wanted: set[Call] = set()
        waiting = [v.call for v in self.outputs]
        while waiting:
            call = waiting.pop()
            if call is not None and call not in wanted:
                wanted.add(call)
                waiting += [v.call for v in call.values()]
        return [call for call in self.calls if call in wanted]


def _key(tree: Any) -> Any:
    """Hashable; numbers of other types are other keys."""
    if isinstance(tree, (tuple, list)):
        return tuple(map(_key, tree))
    if isinstance(tree, dict):
        return tuple((k, _key(t)) for k, t in sorted(tree.items()))
    return (type(tree), repr(tree)) if isinstance(tree, float) else (type(tree), tree)


def functional(calls: Sequence[Recorded], inputs: Sequence[Tensor]) -> list[Recorded]:
    """The calls without writes in place: `relu_` becomes `relu`, where nobody reads another view of the written memory later.

    Raises CannotTraceError where it cannot be seen that the meaning stays.
    """
    last: dict[int, int] = {}
    for at, (_, args, kwargs, _) in enumerate(calls):
        last |= {id(t): at for t in leaves((args, kwargs)) if isinstance(t, Tensor)}
    fixed, aliases = {memory(t) for t in inputs}, dict[int, set[int]]()
    found = []
    for at, (op, args, kwargs, out) in enumerate(calls):
        if op._schema.is_mutable:
            target = args[0]
            views = aliases.get(memory(target), set())
            read = [i for i in views if i != id(target) and last.get(i, -1) > at]
            if memory(target) in fixed or not views or read:
                raise CannotTraceError(f"it writes into memory that is read elsewhere ({op})")
            op = _out_of_place(op, args, out)
        for t in leaves(out):
            if isinstance(t, Tensor):
                aliases.setdefault(memory(t), set()).add(id(t))
        found.append((op, args, kwargs, out))
    return found


def memory(t: Tensor) -> int:
    """Of tensors that are alive: equal for views of one memory."""
    return t.untyped_storage()._cdata


def _out_of_place(op: Any, args: tuple[Any, ...], out: Any) -> Any:
    """The operation that returns what the in-place `op` writes into its first argument."""
    name = op._schema.name.split("::")[1]
    written = [a for a in op._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    same = getattr(getattr(aten, name.removesuffix("_"), None), op._overloadname, None)
    if op.namespace != "aten" or len(written) != 1 or out is not args[0] or not name.endswith("_") or same is None:
        raise CannotTraceError(f"it writes in place ({op})")
    return same
