"""The table of an optimizer's tensors, with which each pass finds changes since the last pass.

collect_grads -> TensorTable.look -> has_params    each comparison is one call of a C function over all tensors
              -> TensorTable.gather                after a difference: looks at each gradient, for the next looks
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from operator import is_, itemgetter, le
from typing import Any

import torch
from torch import Tensor

from fastsam.optim.bucket import Bucket, BucketGrads
from fastsam.optim.parameters import parameters_of
from fastsam.optim.selection import Selection
from fastsam.optim.sharded import to_local

try:  # private to torch: without it, every pass looks at every tensor in Python
    from torch._C._dynamo.guards import TensorGuards
except ImportError:
    TensorGuards = None  # type: ignore[assignment, misc]

_data_ptr = torch.Tensor.data_ptr
_storage = torch.Tensor.untyped_storage
_bytes_of = torch.UntypedStorage.nbytes
_params_of, _values_of = itemgetter("params"), dict.values
Groups = Sequence[dict[str, Any]]
State = dict[Tensor, dict[str, Any]]


def any_gradient(params: Iterable[Tensor]) -> bool:
    """Return True if one of these has a gradient."""
    return any(p.grad is not None for p in params)


def _count_of_one_holder() -> int:
    """Return what `sys.getrefcount` says, called as by `TensorTable`, of an object that one list holds."""
    return next(map(sys.getrefcount, [object()]))


def _kinds(tensors: Iterable[Tensor | None]) -> list[Any]:
    """Return class, layout, dtype, device, shape, strides and pending signs of tensors."""
    return [
        (type(t), t.layout, t.dtype, t.device, t.shape, t.layout == torch.strided and t.stride(), t.is_neg(),
         t._is_zerotensor()) if t is not None else None
        for t in tensors
    ]  # fmt: skip


def _kind_check(tensors: Sequence[Tensor]) -> Callable[..., bool]:
    """Return a function that is True for arguments with the kinds of `tensors`; torch's own looks at more."""
    if TensorGuards is None or not tensors:
        kinds = _kinds(tensors)
        return lambda *others: _kinds(others) == kinds
    return TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check


class TensorTable:
    """Record of the parameters, their memory, their gradients and the state, as the last pass found them.

    A table belongs to the buffers that were made for these parameters. It holds no gradient.
    """

    def __init__(
        self, groups: Groups, buckets: Sequence[Bucket], late_params: list[Tensor], last_table: TensorTable | None
    ) -> None:
        """
        Args:
            groups: parameter groups.
            buckets: buffers of the parameters.
            late_params: parameters without buffers, because they had no gradient yet.
            last_table: table that this one replaces, or None.
        """
        self._buckets, self._sizes = buckets, [len(group["params"]) for group in groups]
        self._all_params, self._params = parameters_of(groups), [p for bucket in buckets for p in bucket.params]
        self._late_params, self._has_dtensors = late_params, any(bucket.has_dtensors for bucket in buckets)
        tensors = self._tensors()
        self._addresses = list(map(_data_ptr, tensors))
        # As long as a storage has its size, nothing else uses its memory, so that an equal address means the same
        # parameter. The buckets' aliases keep the storages alive anyway.
        self._storages = list(map(_storage, tensors))
        self._nbytes = list(map(_bytes_of, self._storages))
        self._kinds, self._have_kinds = _kinds(tensors), _kind_check(tensors)
        # Parameters with and without a gradient in `gather`, their calls, and the places of the calls' gradients.
        self._present: list[Tensor] | None = None  # None: nothing is expected
        self._absent: list[Tensor] = []
        self._calls: list[tuple[Bucket, Selection, slice]] = []
        self._grads_have_kinds = _kind_check([])
        self._values: list[Any] = []  # entries of the state, and their tensors
        self._num_entries = -1  # entries of the state when references were counted, -1: not counted
        self._counts_alone: list[int] = []  # references to each parameter if only the optimizer has it, 0 for orphans
        # ids of the parameters to which only the optimizer referred from the first
        self._orphans: set[int] | None = last_table._orphans if last_table else None

    def _tensors(self) -> list[Any]:
        """Return the parameters of the buckets, or this rank's parts of them, which may be replaced."""
        return list(map(to_local, self._params)) if self._has_dtensors else self._params

    def look(self, groups: Groups, is_first: bool) -> list[BucketGrads] | None:
        """Return the gradients of a first or second pass if all is as the table says, and None after a difference."""
        if self._present is None or not self.has_params(groups, is_first):
            return None
        grads: list[Any] = [p.grad for p in self._present]
        if not self._grads_have_kinds(*grads) or (self._absent and any(p.grad is not None for p in self._absent)):
            return None
        return [(bucket, part, grads[place]) for bucket, part, place in self._calls]

    def has_params(self, groups: Groups, is_first: bool = True) -> bool:
        """Return False if the buffers do not fit: a parameter was added, replaced, moved, converted, assigned, cut or
        transposed, or its memory was freed. A second pass finds what was moved or assigned since the first."""
        lists = list(map(_params_of, groups))
        is_same = list(map(len, lists)) == self._sizes and all(map(is_, chain.from_iterable(lists), self._all_params))
        tensors = self._tensors() if self._has_dtensors else self._params
        if not is_same or list(map(_data_ptr, tensors)) != self._addresses:
            return False
        return not is_first or (list(map(_bytes_of, self._storages)) == self._nbytes and self._has_kinds(tensors))

    def _has_kinds(self, tensors: Sequence[Tensor]) -> bool:
        """Return True for the kinds of before. A check of torch looks at more, such as `requires_grad`, so a new one
        replaces it if only that differs."""
        if self._have_kinds(*tensors):
            return True
        if has_kinds := _kinds(tensors) == self._kinds:
            self._have_kinds = _kind_check(tensors)
        return has_kinds

    def gather(self) -> list[BucketGrads]:
        """Return the gradients, after a look at each of them, and expect gradients of these kinds in the next looks.

        Nothing is expected if the calls have other tensors than the parameters' own gradients. Raises RuntimeError for
        unusable gradients.
        """
        self._present, self._absent, self._calls, self._num_entries, stop = None, [], [], -1, 0
        result = [(bucket, *bucket.gather()) for bucket in self._buckets]
        grads = [g for _, _, bucket_grads in result for g in bucket_grads]
        own_grads = [g for p in self._params if (g := p.grad) is not None]
        if not self._has_dtensors and all(map(is_, grads, own_grads)):
            for bucket, selection, bucket_grads in result:
                self._calls.append((bucket, selection, slice(stop, stop := stop + len(bucket_grads))))
            self._present = [p for p in self._params if p.grad is not None]
            self._absent = [p for p in (*self._params, *self._late_params) if p.grad is None]
            self._grads_have_kinds = _kind_check(grads)
        return result

    def has_state(self, state: State) -> bool:
        """Return False if the state has other entries or tensors than at the last call."""
        entries: list[Any] = list(state.values())
        try:
            values = [*entries, *chain.from_iterable(map(_values_of, entries))]
        except TypeError:  # an entry of the user is not a dict
            values = entries
        old_values, self._values = self._values, values
        return len(values) == len(old_values) and all(map(is_, values, old_values))

    def abandoned_numbers(self, groups: Groups, state: State) -> list[int]:
        """Return the numbers of parameters to which only the optimizer refers, because the model was given other ones.

        A live autograd graph or a TorchScript module counts as a reference. A parameter that had a gradient and no
        other reference at first is not abandoned.
        """
        if len(state) != self._num_entries:
            self._count_references(groups, state)
        return [i for i, is_alone in enumerate(self._are_alone()) if is_alone] if any(self._are_alone()) else []

    def _count_references(self, groups: Groups, state: State) -> None:
        """Count the references that the optimizer itself has to each parameter."""
        lists = [group["params"] for group in groups] + [bucket.params for bucket in self._buckets]
        lists += [self._all_params, self._params, self._late_params, self._present or [], self._absent]
        counts = Counter(map(id, chain.from_iterable(lists)))
        one = _count_of_one_holder() - 1
        self._num_entries = len(state)
        self._counts_alone = [one + counts[id(p)] + (p in state) for p in self._all_params]
        if self._orphans is None:
            are_alone = zip(list(self._are_alone()), self._all_params, strict=True)
            self._orphans = {id(p) for is_alone, p in are_alone if is_alone and p.grad is not None}
        for i, p in enumerate(self._all_params):
            if id(p) in self._orphans:
                self._counts_alone[i] = 0

    def _are_alone(self) -> Iterator[bool]:
        return map(le, map(sys.getrefcount, self._all_params), self._counts_alone)
