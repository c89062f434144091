"""What the owner of parameters of full precision allows: for a while they have the memory of their perturbed weights,
so that none is copied."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

# Elements per tensor, on average, from which the bytes that are saved (4 of 40 per float32 element) are worth more than
# the exchange (0.45 us of the interpreter per tensor). Measured on a CPU, docs/kernels.md: even at 16,384 with one
# thread, at 40,000 with two, which share the bytes alone.
WORTH = 65_536
# By arithmetic, on no GPU yet: 2.4 us of the host are 4 bytes of 2,600,000 elements where memory copies 4.3 TB/s
# (bench/predictions.py), of 2,000,000 at 3.35.
WORTH_ON_GPU = 2_097_152

Place = tuple[int, torch.Size, tuple[int, ...]]  # address, shape, strides
_data_ptr, _size, _stride = torch.Tensor.data_ptr, torch.Tensor.size, torch.Tensor.stride
_storage = torch.Tensor.untyped_storage
_bytes_of, _resizable = torch.UntypedStorage.nbytes, torch.UntypedStorage.resizable


def pays(params: Sequence[Tensor]) -> bool:
    """Whether to exchange the memory of these parameters: a rule on sizes alone, so that the same model always takes
    the same way."""
    worth = WORTH_ON_GPU if params[0].is_cuda else WORTH
    return sum(p.numel() for p in params) >= worth * len(params)


def lendable(params: Sequence[Tensor], slots: Sequence[int], grads: Sequence[Tensor]) -> bool:
    """Whether these are the gradients of the parameters in `slots` themselves, each with memory of its own: no part of
    a larger one (a bucket of DistributedDataParallel, a flat vector), and no tensor beside it that shares it."""
    alone = len(set(map(id, grads))) == len(grads)
    return alone and all(params[i].grad is g for i, g in zip(slots, grads, strict=True)) and _own_memory(grads)


def _own_memory(tensors: Sequence[Tensor]) -> bool:
    storages = list(map(_storage, tensors))
    if list(map(_bytes_of, storages)) != [t.nbytes for t in tensors] or not all(map(_resizable, storages)):
        return False
    # The tensor's, and that of `storages`.
    return {torch._C._storage_Use_Count(storage._cdata) for storage in storages} <= {2}


def _give_up(tensors: Sequence[Tensor]) -> None:
    """Before the last reference to tensors goes: on a GPU their memory, which is that of the stream that allocated
    them, waits for the current one. Whatever read them is behind that: it is about to write the weights for which they
    stood."""
    for tensor in tensors:
        if tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream(tensor.device))


def _places(tensors: Sequence[Tensor]) -> Iterator[Place]:
    return zip(map(_data_ptr, tensors), map(_size, tensors), map(_stride, tensors), strict=True)


class Exchange:
    """Some parameters, aliases of their own memory, and where their perturbed weights are in a step.

    `params` is the bucket's list, of which these are in `slots`: a list of our own would be another reference to each,
    see `ParamGuard.abandoned`.
    """

    def __init__(self, params: Sequence[Tensor], slots: Sequence[int], own: Sequence[Tensor]) -> None:
        self._params, self._slots, self._own = params, slots, own
        self.apart: list[Tensor] = []  # what has the perturbed weights
        self._lent = False  # these were gradients
        self._sizes, self._strides = list(map(_size, own)), list(map(_stride, own))
        self._left_at: list[Place] = []  # the places of parameters that `leave` took there

    def take(self, apart: Sequence[Tensor], lent: bool) -> None:
        """These tensors, like the parameters, are about to have the perturbed weights. lent: they are the gradients,
        which the parameters then have no more, since a backward pass would add to them."""
        self.apart, self._lent = list(apart), lent
        self._left_at = list(zip(map(_data_ptr, apart), self._sizes, self._strides, strict=True))
        for i in self._slots if lent else ():
            self._params[i].grad = None

    def leave(self) -> None:
        """Gives the parameters the memory of their perturbed weights."""
        for i, apart in zip(self._slots, self.apart, strict=True):
            self._params[i].data = apart

    def bring(self, slot: int) -> bool:
        """Gives one of the parameters its own memory back, before the others. False where it is elsewhere."""
        i = self._slots.index(slot)
        p = self._params[slot]
        if next(_places([p])) != self._left_at[i]:
            return False
        if self._lent:
            _give_up(self.apart[i : i + 1])
        p.data = self.apart[i] = self._own[i]  # nothing of the perturbed weights stays here
        return True

    def come_home(self) -> None:
        """Gives parameters their own memory back, but for those that somebody moved or cut, and those that never
        left."""
        params = [self._params[i] for i in self._slots]
        for p, own, here, left in zip(params, self._own, _places(params), self._left_at, strict=True):
            if here == left:
                p.data = own
        if self._lent:
            _give_up(self.apart)
        self.apart = []  # the memory of a gradient goes back
        torch._C._increment_version(self._own)  # a graph that saved the perturbed weights then raises
