"""Between a user's parameters and the kernels: which tensors enter an op call, checked, in the order of the layout."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from . import ops
from .arena import Arena, Layout, is_dense

# Who holds a parameter while `_check_alive` looks at it when nobody but the optimizer does: the group's list, the bucket's list, the
# local variable, and the argument of getrefcount; one more when it is a key of the optimizer's state.
_OWN_REFERENCES = 4

Slots = tuple[int, ...] | None  # None: all parameters of the bucket
State = dict[Parameter, dict[str, Any]]


@dataclass
class Pass:
    """The gradients of one backward pass, for the parameters that have one."""

    slots: Slots
    grads: list[Tensor]


@dataclass
class Part:
    """One op call of an update: parameters that are treated alike."""

    slots: Slots
    table: Tensor
    weights: list[Tensor]
    grads: list[Tensor]
    origin: Tensor | None
    first: bool = False


class Bucket:
    """The parameters of one dtype: their layout, their fields, and the kernels that serve them.

    Dense parameters enter the ops themselves; one with gaps (a column slice) goes through a dense copy that is written back.
    """

    def __init__(self, params: Sequence[Parameter], groups: Sequence[int], names: Sequence[int], backend: str, fused: bool) -> None:
        self.params, self.names = list(params), list(names)  # names: positions among all parameters, for messages
        self.dtype, self.device = params[0].dtype, params[0].device
        self.kernels = ops.bind(backend, self.device, self.dtype)
        self.dense = [is_dense(p) for p in params]
        self.layout = Layout.of([p if d else p.detach().contiguous() for p, d in zip(params, self.dense, strict=True)], groups)
        self.arena = Arena(self.layout, rows=1, device=self.device)
        self.state_dtype = ops.compute_dtype(self.dtype)
        # Half-precision weights with a fused update have a float32 master copy, which is their backup too.
        self.master = fused and self.state_dtype != self.dtype
        self.origin = self.arena.field("origin", self.state_dtype if self.master else self.dtype)
        if self.master:
            self.layout.gather([p.detach() for p in params], self.origin[0])
        self.steps = torch.zeros(1, len(params), device=self.device)  # Adam's t
        self.fresh = set(range(len(params)))  # parameters whose state has not begun
        self.addresses = [p.data_ptr() for p in params]
        self._all_dense = all(self.dense)
        self._strides = [s.stride for s in self.layout.segments]
        self._ordered_by_stride = [i for i, p in enumerate(params) if not (p.is_contiguous() and self.dense[i])]
        self._tables: dict[tuple[int, ...], Tensor] = {}

    def views(self, field: str) -> list[Tensor]:
        return self.arena.views(field)

    def field(self, name: str) -> Tensor:
        return self.arena.field(name, self.state_dtype)

    def moved(self) -> bool:
        """Whether a parameter's memory is not where it was."""
        return [p.data_ptr() for p in self.params] != self.addresses

    def fits(self) -> bool:
        """Whether the parameters still have the dtype, device, shape and strides of the layout; then their addresses are taken over."""
        for p, s, dense in zip(self.params, self.layout.segments, self.dense, strict=True):
            if p.dtype != self.dtype or p.device != self.device or p.shape != s.shape or is_dense(p) != dense or (dense and p.stride() != s.stride):
                return False
        self.addresses = [p.data_ptr() for p in self.params]
        return True

    # ---- what enters a call ------------------------------------------------------------------------------------------

    def table(self, slots: Slots) -> Tensor:
        if slots is None:
            return self.layout.table
        found = self._tables.get(slots)
        if found is None:
            found = self._tables[slots] = self.layout.subtable(slots)
        return found

    def gather(self, state: State) -> Pass:
        """The gradients where autograd left them. Raises RuntimeError for one that is sparse or of another dtype."""
        grads = [p.grad for p in self.params]
        dtype = self.dtype
        odd: Sequence[int] = self._ordered_by_stride
        if not all([g is not None and g.dtype is dtype and g.layout is torch.strided and g.is_contiguous() for g in grads]):
            odd = range(len(grads))
        for i in odd:
            grads[i] = self._ordered(i, grads[i], state)
        present = [g for g in grads if g is not None]
        if len(present) == len(grads):
            return Pass(None, present)
        return Pass(tuple(i for i, g in enumerate(grads) if g is not None), present)

    def _ordered(self, i: int, grad: Tensor | None, state: State) -> Tensor | None:
        """The gradient of parameter i with its elements in the parameter's order; None when there is none."""
        if grad is None:
            self._check_alive(self.params[i], self.names[i], state)
            return None
        if grad.layout is not torch.strided:
            raise RuntimeError(
                f"the gradient of parameter {self.names[i]} is sparse ({grad.layout}); FusedSAM takes dense gradients: build the embedding with "
                "sparse=False, or give these parameters an optimizer of their own"
            )
        if grad.dtype != self.dtype:
            raise RuntimeError(f"the gradient of parameter {self.names[i]} must be {self.dtype} like the parameter, got {grad.dtype}")
        if grad.stride() == self._strides[i]:
            return grad
        return torch.empty_strided(grad.shape, self._strides[i], dtype=self.dtype, device=self.device).copy_(grad)

    def _check_alive(self, p: Parameter, name: int, state: State) -> None:
        if sys.getrefcount(p) <= _OWN_REFERENCES + 1 + (p in state):
            raise RuntimeError(
                f"parameter {name} has no gradient and belongs to nobody but this optimizer any more: it was replaced, as load_state_dict(assign=True) "
                "does. Build a new FusedSAM over model.parameters() and load this one's state_dict() into it"
            )

    def weights(self, slots: Slots) -> list[Tensor]:
        """The weights as the ops take them."""
        if self._all_dense and slots is None:
            return self.params  # type: ignore[return-value]
        chosen = range(len(self.params)) if slots is None else slots
        return [self.params[i] if self.dense[i] else self.params[i].detach().contiguous() for i in chosen]

    def wrote(self, slots: Slots, weights: list[Tensor]) -> None:
        """Writes dense copies back to the parameters they stand for."""
        if not self._all_dense:
            for i, weight in zip(range(len(self.params)) if slots is None else slots, weights, strict=True):
                if not self.dense[i]:
                    self.params[i].copy_(weight)

    def as_pass(self, slots: Sequence[int]) -> Pass:
        """The pass that perturbed `slots`, without its gradients."""
        return Pass(None if len(slots) == len(self.params) else tuple(slots), [])

    def divided(self, part: Part, began: set[int]) -> Iterator[Part]:
        """`part` as two: the parameters whose momentum begins, and the others."""
        slots = range(len(self.params)) if part.slots is None else part.slots
        for first in (True, False):
            chosen = [n for n, slot in enumerate(slots) if (slot in began) == first]
            if chosen:
                names = tuple(slots[n] for n in chosen)
                weights, grads = [part.weights[n] for n in chosen], [part.grads[n] for n in chosen]
                yield Part(names, self.table(names), weights, grads, part.origin, first)

    # ---- the steps ---------------------------------------------------------------------------------------------------

    def norm_(self, sumsq: Tensor, grads: Pass, hyper: Tensor, adaptive: bool, accumulate: bool) -> None:
        weights = self.weights(grads.slots) if adaptive else []
        self.kernels.norm_(sumsq, grads.grads, weights, self.table(grads.slots), hyper, accumulate)

    def perturb_(self, grads: Pass, hyper: Tensor, sumsq: Tensor) -> None:
        weights = self.weights(grads.slots)
        self.kernels.perturb_(weights, self.origin, grads.grads, self.table(grads.slots), hyper, sumsq, True)
        self.wrote(grads.slots, weights)

    def restore_(self, slots: Slots) -> None:
        weights = self.weights(slots)
        self.kernels.restore_(weights, self.origin, self.table(slots))
        self.wrote(slots, weights)

    def perturbed_slots(self, grads: Pass, hyper: Tensor, sumsq: Tensor) -> Slots:
        """Which parameters a perturbation that was interrupted has moved: those that lie where their backup and gradient put them."""
        slots = range(len(self.params)) if grads.slots is None else grads.slots
        moved = []
        for slot, grad in zip(slots, grads.grads, strict=True):
            table, (weight,) = self.table((slot,)), self.weights((slot,))
            expected = torch.empty_like(weight)
            self.kernels.perturb_([expected], self.origin, [grad], table, hyper, sumsq, False)
            if torch.equal(expected, weight):
                moved.append(slot)
        return tuple(moved)

    def parts(self, first: Pass, second: Pass, hyper: Tensor) -> Iterator[Part]:
        """The op calls of an update: perturbed parameters are read from `origin`, others from themselves. A parameter whose second gradient
        is missing is only restored."""
        if first.slots is None and second.slots is None:
            yield Part(None, self.layout.table, self.weights(None), second.grads, self.origin)
            return
        everything = tuple(range(len(self.params)))
        perturbed = set(everything if first.slots is None else first.slots)
        grads = dict(zip(everything if second.slots is None else second.slots, second.grads, strict=True))
        both = tuple(i for i in grads if i in perturbed)
        late = tuple(i for i in grads if i not in perturbed)
        only = tuple(i for i in sorted(perturbed) if i not in grads)
        if only:
            self.restore_(only)
        if late and self.master:  # takes over what the user wrote to the weights since the last step
            zero = torch.zeros(1, dtype=torch.float64, device=self.device)
            self.perturb_(Pass(late, [grads[i] for i in late]), hyper, zero)
        for slots, origin in ((both, self.origin), (late, self.origin if self.master else None)):
            if slots:
                yield Part(slots, self.table(slots), self.weights(slots), [grads[i] for i in slots], origin)


def make_buckets(param_groups: Sequence[dict[str, Any]], backend: str, fused: bool) -> list[Bucket]:
    """One bucket per dtype, in the order of the first parameter of each."""
    by_dtype: dict[torch.dtype, tuple[list[Parameter], list[int], list[int]]] = {}
    position = 0
    for g, group in enumerate(param_groups):
        for p in group["params"]:
            params, groups, names = by_dtype.setdefault(p.dtype, ([], [], []))
            params.append(p)
            groups.append(g)
            names.append(position)
            position += 1
    return [Bucket(params, groups, names, backend, fused) for params, groups, names in by_dtype.values()]


def check_parameters(params: Sequence[Any]) -> None:
    """Raises TypeError or ValueError for parameters that one fused step cannot serve."""
    seen: dict[int, int] = {}
    memory: list[tuple[int, int, int]] = []
    for i, p in enumerate(params):
        if not isinstance(p, Tensor):
            raise TypeError(f"parameter {i} must be a tensor, got {type(p).__name__}")
        if id(p) in seen:
            raise ValueError(f"parameter {i} is parameter {seen[id(p)]} again; list each parameter once (a tied one too)")
        seen[id(p)] = i
        if type(p).__name__ == "DTensor" or hasattr(p, "_local_tensor") or hasattr(p, "_fsdp_flattened") or hasattr(p, "_is_flat_param"):
            raise TypeError(
                f"parameter {i} is sharded (DTensor or FSDP): a norm over its local part would be wrong. FusedSAM serves whole parameters, also under "
                "DistributedDataParallel"
            )
        if not p.is_floating_point():
            raise ValueError(f"parameter {i} must be float32, float64, float16 or bfloat16, got {p.dtype}; leave it out of the optimizer")
        if p.layout is not torch.strided:
            raise ValueError(f"parameter {i} must be dense, got {p.layout}")
        if p.device != params[0].device:
            raise ValueError(f"all parameters must be on one device; parameter 0 is on {params[0].device}, parameter {i} on {p.device}: use an optimizer per device")
        if p.numel() > 1 and any(stride == 0 and size > 1 for stride, size in zip(p.stride(), p.shape, strict=True)):
            raise ValueError(f"parameter {i} of shape {tuple(p.shape)} is expanded: its elements share memory; use parameter.clone()")
        if p.numel() and p.device.type != "meta":
            extent = 1 + sum((n - 1) * s for n, s in zip(p.shape, p.stride(), strict=True))
            memory.append((p.data_ptr(), p.data_ptr() + extent * p.element_size(), i))
    memory.sort()
    for (_, end, i), (start, _, j) in zip(memory, memory[1:]):
        if start < end and is_dense(params[i]) and is_dense(params[j]):
            raise ValueError(f"parameters {min(i, j)} and {max(i, j)} share memory: tie them by using one Parameter in both places")
