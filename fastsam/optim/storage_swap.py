"""Swaps of storage: for a while, parameters have the memory of their perturbed weights, so that none is copied."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

# Elements per tensor, on average, from which the bytes that are saved (4 of 40 per float32 element) are worth more than
# the exchange (0.45 us of the interpreter per tensor). Measured on a CPU, docs/kernels.md: even at 16,384 with one
# thread, at 40,000 with two, which share only the memory traffic.
MIN_MEAN_NUMEL_CPU = 65_536
# By arithmetic, on no GPU yet: 2.4 us of the host are 4 bytes of 2,600,000 elements where memory copies 4.3 TB/s, of
# 2,000,000 at 3.35.
MIN_MEAN_NUMEL_CUDA = 2_097_152

Place = tuple[int, torch.Size, tuple[int, ...]]  # address, shape, strides
_data_ptr, _size, _stride = torch.Tensor.data_ptr, torch.Tensor.size, torch.Tensor.stride
_storage = torch.Tensor.untyped_storage
_bytes_of, _resizable = torch.UntypedStorage.nbytes, torch.UntypedStorage.resizable


def worth_swapping(params: Sequence[Tensor]) -> bool:
    """Return True if the memory of these parameters should be swapped: a rule on sizes only, so equal models behave
    alike."""
    min_mean = MIN_MEAN_NUMEL_CUDA if params[0].is_cuda else MIN_MEAN_NUMEL_CPU
    return sum(p.numel() for p in params) >= min_mean * len(params)


def grad_storage_reusable(params: Sequence[Tensor], slots: Sequence[int], grads: Sequence[Tensor]) -> bool:
    """Return True if these are the gradients of the parameters in `slots`, and each has separate memory, which a part
    of a larger tensor (a bucket of DistributedDataParallel) has not."""
    if len(set(map(id, grads))) != len(grads) or any(
        params[i].grad is not g for i, g in zip(slots, grads, strict=True)
    ):
        return False
    storages = list(map(_storage, grads))
    if list(map(_bytes_of, storages)) != [g.nbytes for g in grads] or not all(map(_resizable, storages)):
        return False
    # One reference of the tensor, and one of `storages`.
    return {torch._C._storage_Use_Count(storage._cdata) for storage in storages} <= {2}


def _record_stream(tensors: Sequence[Tensor]) -> None:
    """Make the memory of these tensors wait for the current stream, which runs the kernels, before it is freed."""
    for tensor in tensors:
        if tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream(tensor.device))


def _places(tensors: Sequence[Tensor]) -> Iterator[Place]:
    return zip(map(_data_ptr, tensors), map(_size, tensors), map(_stride, tensors), strict=True)


class StorageSwap:
    """Some parameters, aliases of their memory, and the memory of their perturbed weights in a step.

    `params` is the bucket's list, and these parameters are in its `slots`. Another list would be another reference to
    each parameter, see `TensorTable.abandoned_numbers`.
    """

    def __init__(self, params: Sequence[Tensor], slots: Sequence[int], originals: Sequence[Tensor]) -> None:
        self._params, self._slots, self._original_places = params, slots, originals
        self.targets: list[Tensor] = []  # memory of the perturbed weights
        self._is_donated = False  # the targets were gradients
        self._sizes, self._strides = list(map(_size, originals)), list(map(_stride, originals))
        self._target_places: list[Place] = []  # places of the parameters after `swap_in`

    def set_targets(self, targets: Sequence[Tensor], is_donated: bool) -> None:
        """Choose these tensors, like the parameters, for the perturbed weights. If `is_donated` is True they are the
        gradients. The parameters lose them, because a backward pass would add to them."""
        self.targets, self._is_donated = list(targets), is_donated
        self._target_places = list(zip(map(_data_ptr, targets), self._sizes, self._strides, strict=True))
        for i in self._slots if is_donated else ():
            self._params[i].grad = None

    def swap_in(self) -> None:
        """Give the parameters the memory of their perturbed weights."""
        for i, target in zip(self._slots, self.targets, strict=True):
            self._params[i].data = target

    def swap_back_one(self, slot: int) -> bool:
        """Give one of the parameters its own memory back, before the others. Return False if it is elsewhere."""
        i = self._slots.index(slot)
        p = self._params[slot]
        if next(_places([p])) != self._target_places[i]:
            return False
        if self._is_donated:
            _record_stream(self.targets[i : i + 1])
        p.data = self.targets[i] = self._original_places[i]  # nothing of the perturbed weights stays here
        return True

    def swap_back(self) -> None:
        """Give parameters their own memory back, except parameters that were moved or cut, or that have it already."""
        params = [self._params[i] for i in self._slots]
        for p, original, place, target_place in zip(
            params, self._original_places, _places(params), self._target_places, strict=True
        ):
            if place == target_place:
                p.data = original
        if self._is_donated:
            _record_stream(self.targets)
        self.targets = []  # the memory of a gradient goes back
        torch._C._increment_version(self._original_places)  # a graph that saved the perturbed weights then raises
