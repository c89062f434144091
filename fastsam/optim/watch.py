"""Notices, cheaply and in every step, what happened to the parameters and to the state since the last one."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from itertools import chain
from operator import is_not, itemgetter
from typing import Any

import torch
from torch import Tensor

from fastsam.optim.sharded import is_sharded, local

try:  # private to torch: where it is missing, every pass looks at every tensor in Python
    from torch._C._dynamo.guards import TensorGuards
except ImportError:
    TensorGuards = None  # type: ignore[assignment, misc]

_data_ptr = torch.Tensor.data_ptr
_storage = torch.Tensor.untyped_storage
_bytes_of = torch.UntypedStorage.nbytes
_params_of = itemgetter("params")
Groups = Sequence[dict[str, Any]]
State = dict[Tensor, dict[str, Any]]


def parameters_of(groups: Groups) -> list[Tensor]:
    """All parameters of all groups, in order."""
    return [p for group in groups for p in group["params"]]


def _count_of_one_holder() -> int:
    """What `sys.getrefcount` says, called as below, of an object that one list holds."""
    holder = [object()]
    return next(map(sys.getrefcount, holder))


def _like(tensors: Sequence[Tensor]) -> Any:
    """A function of as many tensors: whether they have these ones' class, dtype, device, layout, shape, strides and
    pending signs, as torch's compiler compares them."""
    return TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check


class _Memory:
    """The addresses of parameters, and how large the storages are that they lie in."""

    def __init__(self, params: Sequence[Tensor]) -> None:
        self._pointers = list(map(_data_ptr, params))
        # As long as one of these has its size, its memory is nobody else's, so an address in it is that of the same
        # parameter. The buckets' aliases keep them alive anyway.
        self._storages = list(map(_storage, params))
        self._bytes = list(map(_bytes_of, self._storages))

    def same(self, params: Sequence[Tensor]) -> bool:
        return list(map(_data_ptr, params)) == self._pointers and list(map(_bytes_of, self._storages)) == self._bytes


def _kinds(params: Sequence[Tensor]) -> list[tuple[Any, ...]]:
    return [(p.shape, p.stride(), p.dtype, p.device) for p in params]


class Watch:
    """What the parameters and the state were when last looked at."""

    def __init__(
        self, params: list[Tensor], holders: int, before: Watch | None = None, members: list[Tensor] | None = None
    ) -> None:
        """`holders`: how many references to each parameter the optimizer itself holds, this list aside and the state
        aside.
        `before`: the watch that this one follows. `members`: those whose memory matters, None for all of `params`."""
        self.params = params
        self.members = members = params if members is None else members
        # Parameters of which a part is here may get another one; theirs is the memory that matters.
        self._sharded = any(map(is_sharded, members))
        self._holders = holders + 1
        self._sizes: list[int] = []
        members = self._here
        self._memory = _Memory(members)
        self._kinds = _kinds(members)
        self._like = None if TensorGuards is None or not members else _like(members)
        self._dicts: list[dict[str, Any]] = []
        self._alone: list[int] = []  # per parameter: the count of references when only the optimizer has it
        self._most = 0  # the largest of these
        # ids of those that it had alone from the first
        self._orphans: set[int] | None = before._orphans if before else None

    @property
    def _here(self) -> list[Tensor]:
        return list(map(local, self.members)) if self._sharded else self.members

    def note(self, groups: Groups, state: State) -> None:
        """Takes the groups and the state as they are."""
        self._sizes = [len(g["params"]) for g in groups]
        alone = _count_of_one_holder() - 1 + self._holders
        self._alone = [alone + (p in state) for p in self.params]
        if self.members is not self.params:  # another list that refers to them
            members = set(map(id, self.members))
            self._alone = [count + (id(p) in members) for count, p in zip(self._alone, self.params, strict=True)]
        self._most = max(self._alone, default=0)
        self._dicts = list(state.values())

    def same_parameters(self, groups: Groups) -> bool:
        """False when the groups hold other parameters than before."""
        if [len(g["params"]) for g in groups] != self._sizes:
            return False
        now: Iterable[Tensor] = (
            groups[0]["params"] if len(groups) == 1 else chain.from_iterable(g["params"] for g in groups)
        )
        return not any(map(is_not, now, self.params))

    def same_memory(self) -> bool:
        """False when a member lies elsewhere or otherwise: moved, converted, assigned, cut, transposed, its memory
        freed."""
        members = self._here
        if not self._memory.same(members):
            return False
        if self._like is not None and self._like(*members):
            return True
        return _kinds(members) == self._kinds  # the guards look at more, such as `requires_grad`

    def same_state(self, state: State) -> bool:
        """False when the state has other entries than before."""
        return len(state) == len(self._dicts) and not any(map(is_not, state.values(), self._dicts))

    def abandoned(self) -> list[int]:
        """The numbers of parameters that nobody but the optimizer refers to any more: whoever trains them has been
        given others.

        What is in a live autograd graph or in a TorchScript module counts as referred to. A parameter that had a
        gradient and no other holder when it was first looked at is the optimizer's alone, and not abandoned.
        """
        if self._orphans is not None and min(map(sys.getrefcount, self.params), default=0) > self._most:
            return []
        counts = list(map(sys.getrefcount, self.params))
        alone = [i for i, count in enumerate(counts) if count <= self._alone[i]]
        if self._orphans is None:
            self._orphans = {id(self.params[i]) for i in alone if self.params[i].grad is not None}
        return [i for i in alone if id(self.params[i]) not in self._orphans]


class Steady:
    """What a pass saw that found a usable gradient for every parameter; so that the next one sees in a few calls that
    all is as before."""

    def __init__(
        self,
        groups: Groups,
        params: list[Tensor],
        grads: Sequence[Tensor],
        state: State,
        left_out: tuple[list[Tensor], list[Tensor]] | None = None,
    ) -> None:
        """`left_out`: all parameters of the groups, and those of them that are not in `params` and have no gradient;
        None where there are none."""
        self._sizes = [len(g["params"]) for g in groups]
        self._members = params  # the caller's lists: those of our own would count as other references to each
        self._params, self._left_out = (params, []) if left_out is None else left_out
        self._entries = list(state.values())
        self._memory = _Memory(params)
        self._like = _like([*params, *grads])

    def gradients(self, groups: Groups, state: State) -> list[Tensor] | None:
        """The gradients that are there now. None when they are of another kind, or the parameters, their kind, their
        places in memory or the entries of the state changed."""
        if len(groups) != len(self._sizes):
            return None
        params = groups[0]["params"]
        if len(groups) > 1:
            lists = list(map(_params_of, groups))
            if list(map(len, lists)) != self._sizes:
                return None
            params = list(chain(*lists))
        entries = state.values()
        if len(params) != len(self._params) or len(entries) != len(self._entries):
            return None
        if any(map(is_not, params, self._params)) or any(map(is_not, entries, self._entries)):
            return None
        if self._left_out:
            if any_gradient(self._left_out):
                return None
            params = self._members
        if not self._memory.same(params):
            return None
        grads: list[Any] = [p.grad for p in params]
        return grads if self._like(*params, *grads) else None


def any_gradient(params: Sequence[Tensor]) -> bool:
    """Whether one of these has a gradient."""
    return any(p.grad is not None for p in params)


def steady_of(
    groups: Groups,
    params: list[Tensor],
    grads: Sequence[Tensor],
    state: State,
    left_out: tuple[list[Tensor], list[Tensor]] | None,
) -> Steady | None:
    """What a pass saw; None where torch has not what it takes."""
    return None if TensorGuards is None else Steady(groups, params, grads, state, left_out)
