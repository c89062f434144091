"""Cheap comparison of parameters, gradients and state with the pass before."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from itertools import chain
from operator import is_, is_not, itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastsam.optim.bucket import Bucket, BucketGrads
from fastsam.optim.selection import Selection
from fastsam.optim.sharded import to_local

try:  # private to torch: without it, every pass looks at every tensor in Python
    from torch._C._dynamo.guards import TensorGuards
except ImportError:
    TensorGuards = None  # type: ignore[assignment, misc]

_data_ptr = torch.Tensor.data_ptr
_storage = torch.Tensor.untyped_storage
_bytes_of = torch.UntypedStorage.nbytes
_params_of = itemgetter("params")
_values = dict.values
Groups = Sequence[dict[str, Any]]
State = dict[Tensor, dict[str, Any]]


def any_gradient(params: Sequence[Tensor]) -> bool:
    """Return True if one of these has a gradient."""
    return any(p.grad is not None for p in params)


def _count_of_one_holder() -> int:
    """Return what `sys.getrefcount` says, called as below, of an object that one list holds."""
    holder = [object()]
    return next(map(sys.getrefcount, holder))


def _guard_of(tensors: Sequence[Tensor]) -> Any:
    """Return a function that compares the class, dtype, device, layout, shape, strides and pending signs of its
    arguments with `tensors`, as torch's compiler does."""
    return TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check


def _kinds(params: Sequence[Tensor]) -> list[tuple[Any, ...]]:
    return [(p.shape, p.stride(), p.dtype, p.device) for p in params]


class _Memory:
    """Addresses of the parameters of a bucket, and the sizes of their storages."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        params = self.params
        self.pointers = list(map(_data_ptr, params))
        # As long as a storage has its size, nothing else uses its memory, so that an equal address means the same
        # parameter. The bucket's aliases keep the storages alive anyway.
        self.storages = list(map(_storage, params))
        self.nbytes = list(map(_bytes_of, self.storages))
        self._kinds = _kinds(params)
        self._guard = None if TensorGuards is None or not params else _guard_of(params)

    @property
    def params(self) -> list[Tensor]:
        """The parameters, or this rank's parts of them, which may be replaced."""
        bucket = self._bucket
        return list(map(to_local, bucket.params)) if bucket.has_dtensors else bucket.params

    def is_unchanged(self) -> bool:
        params = self.params
        if list(map(_data_ptr, params)) != self.pointers or list(map(_bytes_of, self.storages)) != self.nbytes:
            return False
        if self._guard is not None and self._guard(*params):
            return True
        return _kinds(params) == self._kinds  # the guards look at more, such as `requires_grad`


class _Expectation(NamedTuple):
    """Gradients of a bucket's parameters that a pass expects."""

    bucket: Bucket
    selection: Selection
    memory: _Memory
    absent: list[bool] | None  # by parameter; None if each has a gradient
    guard: Any  # compares the gradients, and in a first pass the parameters


class ParamGuard:
    """Snapshot of the parameters, and of the gradients and state entries that the next passes expect.

    It compares identities of parameters and state tensors, addresses, sizes of storages, and kinds of tensors (shape,
    dtype, device). Each comparison is one call of a C function over all of them. `gradients` makes all of a pass, and
    after a difference the methods before it find the kind of change. The guard holds no list of parameters but
    `params`, and no gradient.
    """

    def __init__(
        self,
        groups: Groups,
        params: list[Tensor],
        buckets: Sequence[Bucket],
        uninitialized_params: list[Tensor],
        last_guard: ParamGuard | None,
        reads_tensors: bool,
    ) -> None:
        """
        Args:
            params: all parameters of all groups, in order.
            uninitialized_params: parameters that are in no bucket.
            last_guard: guard that this one follows.
            reads_tensors: the update is fused, so that the tensors of the state are compared too.
        """
        self.params, self._uninitialized_params, self._reads_tensors = params, uninitialized_params, reads_tensors
        self._memories = list(map(_Memory, buckets))
        self._sizes = [len(g["params"]) for g in groups]
        lists = [params, uninitialized_params, *(g["params"] for g in groups), *(bucket.params for bucket in buckets)]
        self._lists = Counter(map(id, chain.from_iterable(lists)))  # how many of the optimizer's lists hold each
        self._num_entries = 0
        self._values: list[Any] = []  # entries of the state, and their tensors
        self._max_count = 0  # the largest count of references of a parameter that only the optimizer has
        # ids of the parameters to which only the optimizer referred from the first
        self._orphans: set[int] | None = last_guard._orphans if last_guard else None
        # The gradients of a first pass (True) and of a second pass (False); no entry if nothing is expected.
        self.expectations: dict[bool, list[_Expectation]] = {}

    def note_state(self, state: State) -> None:
        """Take over the state as it is."""
        self._num_entries, self._values = len(state), self._values_of(state)
        self._max_count = max(self._counts_alone(state), default=0)

    def _values_of(self, state: State) -> list[Any]:
        entries: list[Any] = list(state.values())
        try:
            return [*entries, *chain.from_iterable(map(_values, entries))] if self._reads_tensors else entries
        except TypeError:  # an entry of the user is not a dict
            return entries

    def _counts_alone(self, state: State) -> list[int]:
        """Return for each parameter the count of references if only the optimizer has it."""
        base_count = _count_of_one_holder() - 1
        return [base_count + self._lists[id(p)] + (p in state) for p in self.params]

    # --- comparisons one by one ---

    def same_parameters(self, groups: Groups) -> bool:
        """Return False if the groups hold other parameters than before."""
        lists = list(map(_params_of, groups))
        if list(map(len, lists)) != self._sizes:
            return False
        return not any(map(is_not, chain.from_iterable(lists), self.params))

    def same_memory(self) -> bool:
        """Return False if a parameter was moved, converted, assigned, cut or transposed, or its memory was freed."""
        return all(memory.is_unchanged() for memory in self._memories)

    def same_state(self, state: State) -> bool:
        """Return False if the state has other entries or tensors than before."""
        values = self._values_of(state)
        return len(values) == len(self._values) and not any(map(is_not, values, self._values))

    def abandoned_numbers(self, state: State) -> list[int]:
        """Return the numbers of parameters to which only the optimizer refers, because the model was given other ones.

        A live autograd graph or a TorchScript module counts as a reference. A parameter that had a gradient and no
        other reference at first is not abandoned.
        """
        if self._orphans is not None and min(map(sys.getrefcount, self.params), default=0) > self._max_count:
            return []
        counts = zip(map(sys.getrefcount, self.params), self._counts_alone(state), strict=True)
        slots = [i for i, (count, count_alone) in enumerate(counts) if count <= count_alone]
        if self._orphans is None:
            self._orphans = {id(self.params[i]) for i in slots if self.params[i].grad is not None}
        return [i for i in slots if id(self.params[i]) not in self._orphans]

    # --- all at once ---

    def expect(self, calls: Sequence[BucketGrads], first: bool) -> None:
        """Expect gradients of the same parameters and kinds as in `calls`, in the next passes.

        Nothing is expected if the calls have other tensors than the parameters' own gradients.
        """
        self.expectations.pop(first, None)
        expectations = []
        for memory, (bucket, selection, grads) in zip(self._memories, calls, strict=True):
            params = bucket.params
            bucket_grads = [params[i].grad for i in selection.slots]
            if TensorGuards is None or not grads or bucket.has_dtensors or not all(map(is_, bucket_grads, grads)):
                return
            absent = None if selection is bucket.whole else [p.grad is None for p in params]
            guard = _guard_of([*params, *grads] if first else grads)
            expectations.append(_Expectation(bucket, selection, memory, absent, guard))
        self.expectations[first] = expectations

    def gradients(
        self, groups: Groups, state: State, first: bool, reads_state: bool = True
    ) -> list[BucketGrads] | None:
        """Return the gradients if everything is as expected, and None if each has to be compared by itself.

        A second pass compares no kinds of parameters, because the first pass of its step did. A pass that does not
        read the state compares only the number of its entries.
        """
        expectations = self.expectations.get(first)
        if expectations is None or not self.same_parameters(groups):
            return None
        if len(state) != self._num_entries or (reads_state and not self.same_state(state)):
            return None
        if self._uninitialized_params and any_gradient(self._uninitialized_params):
            return None
        calls: list[BucketGrads] = []
        for bucket, selection, memory, absent, guard in expectations:
            params = bucket.params
            if list(map(_data_ptr, params)) != memory.pointers:
                return None
            if first and list(map(_bytes_of, memory.storages)) != memory.nbytes:
                return None
            grads: list[Any] = [p.grad for p in params]
            if absent is not None:
                if [g is None for g in grads] != absent:
                    return None
                grads = [g for g in grads if g is not None]
            if not (guard(*params, *grads) if first else guard(*grads)):
                return None
            calls.append((bucket, selection, grads))
        return calls
