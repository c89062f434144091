"""The two passes of an optimizer's step on the CPU, past torch's dispatcher (`csrc/direct.cpp`): the kernels and the bits of `native`.

For callers that checked their operands: one row, one dense tensor per segment of the table, all of one dtype, and gradients in the order of
elements of their weights.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from functools import partial
from struct import Struct
from typing import Any

import torch
from torch import Tensor
from torch.autograd import profiler

from . import look, native
from .look import Look

_TYPES = {torch.float32: 0, torch.float64: 1, torch.float16: 2, torch.bfloat16: 3}  # csrc/launch.h
FAILED = "a kernel could not run: out of memory, or torch's threads failed"
Call = partial[Any]
_address = torch.Tensor.data_ptr
_wrote = torch._C._increment_version
_dispatch_modes, _function_modes = torch._C._len_torch_dispatch_stack, torch._C._len_torch_function_stack


@functools.cache
def _function(name: str) -> Any:
    function = getattr(ctypes.CDLL(native.library()), f"fastsam_{name}")
    pointers, integers = {"norm_perturb": (3, 1), "update_sgd": (3, 2), "update_adam": (5, 2)}[name]
    function.argtypes = [ctypes.c_void_p] * pointers + [ctypes.c_int] * integers
    return function


class Direct:
    """The calls of a step on the weights `z`, valid as long as all of these stay where they are.

    `z`: one tensor per segment; `origin` `[1, stride]`; `table` int64 `[segments, 4]`; `hyper` float64 `[1, groups, width]`.
    """

    def __init__(self, z: Sequence[Tensor], origin: Tensor, table: Tensor, hyper: Tensor) -> None:
        words = [len(z), _address(table), _address(hyper), _TYPES[z[0].dtype], _TYPES[origin.dtype], _address(origin)]
        frame = (ctypes.c_int64 * (len(words) + len(z)))(*words, *map(_address, z))
        self._places = (ctypes.c_int64 * len(z))()  # of the gradients
        self._z, self._held = z, (origin, table, hyper, frame)  # so that no address goes stale
        self._at = ctypes.addressof(frame), ctypes.addressof(self._places)
        self._pack = functools.partial(Struct(f"{len(z)}q").pack_into, self._places, 0)
        # The imaginary part of a conjugate has its sign changed lazily; only with one element is it dense.
        self._single = [i for i, tensor in enumerate(z) if tensor.numel() == 1]
        self._look: Look | None = None
        self._found: list[Tensor] | None = None  # gradients whose places are written down
        self._made: tuple[Any, list[Call]] = (None, [])

    @staticmethod
    def watched() -> bool:
        """True when calls have to be torch's: a profiler or a mode looks at them, or stands in for them."""
        return profiler._is_profiler_enabled or _dispatch_modes() > 0 or _function_modes() > 0

    def remember(self, params: Sequence[Tensor], entries: Sequence[Any]) -> bool:
        """Notes the parameters behind `z`, where they lie, and `entries`, for `gradients`. False where that cannot be done."""
        self._look = None if look.why_not() else Look(params, entries, self._z, self._places)
        return self._look is not None

    def gradients(self, params: list[Tensor], entries: list[Any]) -> list[Tensor] | None:
        """The gradients of the parameters that were noted; None when something is not as it was then, see `Look`."""
        assert self._look is not None
        grads = self._look(params, entries)
        if grads is not None and any(grads[i].is_neg() for i in self._single):
            return None
        self._found = grads
        return grads

    def _locate(self, grads: Sequence[Tensor]) -> None:
        """Writes down where the gradients lie, unless the look that found them did."""
        if grads is not self._found:
            self._pack(*map(_address, grads))
        self._found = None  # which would keep their memory

    def norm_perturb_(self, grads: Sequence[Tensor], sumsq: Tensor, adaptive: bool) -> None:
        """`norm_` of these gradients into `sumsq`, float64 `[1]`, and `perturb_` with it, which saves the weights."""
        self._locate(grads)
        if _function("norm_perturb")(*self._at, _address(sumsq), adaptive):
            raise RuntimeError(FAILED)
        _wrote(self._z)

    def update_sgd(self, grads: Sequence[Tensor], momentum: Tensor | None, first: bool, keep: bool) -> list[Call]:
        """The calls that make `update_sgd_`, see `reference`; valid until the next call of a method."""
        state = None if momentum is None else _address(momentum)
        return self._calls("update_sgd", grads, state, first, keep)

    def update_adam(
        self, grads: Sequence[Tensor], exp_avg: Tensor, exp_avg_sq: Tensor, steps: Tensor, decoupled: bool, keep: bool
    ) -> list[Call]:
        """The calls that make `update_adam_`, see `reference`; valid until the next call of a method."""
        return self._calls("update_adam", grads, *map(_address, (exp_avg, exp_avg_sq, steps)), decoupled, keep)

    def _calls(self, name: str, grads: Sequence[Tensor], *arguments: int | None) -> list[Call]:
        """Calls without a line of Python in them, so that no signal is handled between them; the first returns true when it could not run."""
        self._locate(grads)
        made, calls = self._made
        if made != (name, *arguments):
            calls = [partial(_function(name), *self._at, *arguments), partial(_wrote, self._z)]
            self._made = (name, *arguments), calls
        return calls
