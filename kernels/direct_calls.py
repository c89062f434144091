"""The two passes of an optimizer's step without torch's dispatcher (`csrc/direct_call_args.h`). The kernels and the
bits are the same as with `native`.

Callers must have checked their operands: one row, one dense tensor per segment of the table, all of one dtype, and
gradients with the memory order of their weights.
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

from . import build, libraries
from .constants import check_not_freed
from .rule import pad_state

_TYPES = {torch.float32: 0, torch.float64: 1, torch.float16: 2, torch.bfloat16: 3}  # csrc/kernel_args.h
FAILED = "a kernel could not run: out of memory, or torch's threads or a launch on the GPU failed"
Call = partial[Any]
_address = torch.Tensor.data_ptr
_wrote = torch._C._increment_version
_dispatch_modes, _function_modes = torch._C._len_torch_dispatch_stack, torch._C._len_torch_function_stack


_SIGNATURES = {
    "norm_perturb": (3, 2, ctypes.c_int),
    "update": (4, 2, ctypes.c_int),
    "rule": (1, 0, ctypes.c_void_p),
    "partials": (1, 0, ctypes.c_int64),
}
_HEAD = 7  # words of an argument block before the weights' addresses


@functools.cache
def _function(name: str) -> Any:
    """Return a function of the CPU library, or of the CUDA library if its name ends in `_cuda`."""
    device = "cuda" if name.endswith("_cuda") else "cpu"
    function = getattr(ctypes.CDLL(libraries.library(device)), f"fastsam_{name}")
    pointers, integers, function.restype = _SIGNATURES[name.removesuffix("_cuda")]
    function.argtypes = [ctypes.c_void_p] * pointers + [ctypes.c_int] * integers
    return function


class DirectCalls:
    """The calls of a step on the CPU on the weights `params`. They are valid while no operand is reallocated.

    Args:
        params: one tensor per segment.
        backup: `[1, row_size]`, or None if weights are updated in place and perturbed in separate tensors.
        table: int64 `[segments, 4]`.
        hparams: float64 `[1, groups, width]`.
        launch: address of the `LaunchWord` words of a GPU; 0 on the CPU.
    """

    _suffix = ""  # suffix of the functions' names

    REPEATS = True  # the calls of an update can be repeated with other gradients

    def __init__(
        self, params: Sequence[Tensor], backup: Tensor | None, table: Tensor, hparams: Tensor, launch: int = 0
    ) -> None:
        """See the class."""
        self._launch = launch
        self._call_norm_perturb = _function("norm_perturb" + self._suffix)
        self._places = (ctypes.c_int64 * len(params))()  # addresses of the gradients
        self._pack = Struct(f"{len(params)}q").pack_into
        self._params, self._table, self._hparams = params, table, hparams
        self._refs: list[Any] = [backup]  # keeps the memory allocated that the blocks point to
        if backup is not None:
            self._block = self._make_block(table, backup.dtype, _address(backup))
        self._calls: list[Call] = []
        self._state: Any = None  # addresses of the state fields in the calls of the last update

    @functools.cached_property
    def _in_place_block(self) -> tuple[int, int]:
        """Return the argument block of updates without a backup."""
        return self._make_block(self._table, self._params[0].dtype, 0)

    @functools.cached_property
    def _perturbed_block(self) -> tuple[int, int]:
        """Return an argument block whose backup is the weights, with offsets relative to the lowest weight address."""
        params, table = self._params, self._table.clone()
        first = min((_address(w) for w in params if w.numel()), default=0)
        offsets = [(_address(w) - first) // w.element_size() if w.numel() else 0 for w in params]
        table[:, 0] = torch.tensor(offsets, dtype=torch.int64, device=table.device)
        return self._make_block(table, params[0].dtype, first)

    def _make_block(self, table: Tensor, dtype: torch.dtype, backup: int) -> tuple[int, int]:
        """Return the addresses of an argument block (`csrc/direct_call_args.h`) and of the array of gradient addresses.

        `backup` is the address to which its offsets are relative, 0 without a backup.
        """
        params = self._params
        types = _TYPES[params[0].dtype], _TYPES[dtype]
        words = [len(params), _address(table), _address(self._hparams), *types, backup, self._launch]
        block = (ctypes.c_int64 * (len(words) + len(params)))(*words, *map(_address, params))
        self._refs += [table, block]
        return ctypes.addressof(block), ctypes.addressof(self._places)

    @staticmethod
    def is_watched() -> bool:
        """Return True if a profiler, a dispatch mode or a function mode is on, which must see the calls."""
        return profiler._is_profiler_enabled or _dispatch_modes() > 0 or _function_modes() > 0

    def _locate(self, grads: Sequence[Tensor]) -> None:
        """Store the addresses of the gradients. Raises FreedError if a gradient has no memory."""
        places = list(map(_address, grads))
        if not all(places):
            check_not_freed(grads)
        self._pack(self._places, 0, *places)

    def norm_perturb_(
        self,
        grads: Sequence[Tensor],
        sumsq: Tensor,
        adaptive: bool,
        save: bool = True,
        perturbed_weights: Sequence[Tensor] | None = None,
    ) -> None:
        """Compute `norm_` of these gradients into `sumsq`, float64 `[1]`, then `perturb_` with it.

        Args:
            grads: one gradient per tensor of `params`.
            sumsq: output, the squared norm.
            adaptive: True if a group is adaptive, which requires weights of `backup`'s dtype.
            save: the argument of `perturb_`.
            perturbed_weights: outputs, in place of `params`, which then are only read. They have the shapes and dtype
                of `params`, and may be `grads`. The version counters of `params` are incremented, for
                callers that then use these tensors in place of the weights.
        """
        if perturbed_weights is None:
            block = self._block
        else:
            block = self._perturbed_block
            start = block[0] + _HEAD * ctypes.sizeof(ctypes.c_int64)
            (ctypes.c_int64 * len(perturbed_weights)).from_address(start)[:] = list(map(_address, perturbed_weights))
        self._locate(grads)
        if self._call_norm_perturb(*block, _address(sumsq), adaptive, save):
            raise RuntimeError(FAILED)
        _wrote(self._params)

    def update(
        self,
        rule: str,
        state: Sequence[Tensor | None],
        grads: Sequence[Tensor],
        in_place: bool = False,
        *,
        steps: Tensor | None = None,
        init_state: bool = False,
        write_master: bool = False,
    ) -> list[Call]:
        """Return the calls that make `update_` (see `reference`), the first of which returns true if it failed. They
        serve three of its options.

        The calls are valid until the next `update`. They use the gradients of the last call of any method. They execute
        no line of Python code, so that no signal is handled between them. With `in_place`, weights are read from
        `params`, without a backup.
        """
        self._locate(grads)
        places = [None if field is None else _address(field) for field in (*pad_state(state), steps)]
        # Clear these first: the old calls have the address of `_state`, and an interrupt may come after it is replaced.
        self._calls = []
        self._state = (ctypes.c_void_p * len(places))(*places)
        block = self._in_place_block if in_place else self._block
        kernel, rule_address = _function("update" + self._suffix), _rule(rule, self._suffix)
        function = partial(kernel, *block, rule_address, ctypes.addressof(self._state), init_state, write_master)
        self._calls = [function, partial(_wrote, self._params)]
        return self._calls

    def renew(self, calls: list[Call], grads: Sequence[Tensor]) -> bool:
        """Set new gradients and return True if `calls` come from the last `update`, so that they can be repeated."""
        if calls is not self._calls:
            return False
        self._locate(grads)
        return True


class CudaDirectCalls(DirectCalls):
    """The calls of a step on a GPU, on the current stream.

    Each object has private memory for partial sums and tickets, so that a call allocates nothing.
    """

    _suffix = "_cuda"

    def __init__(self, params: Sequence[Tensor], backup: Tensor | None, table: Tensor, hparams: Tensor) -> None:
        self._words = (ctypes.c_int64 * 4)()  # device, stream, partial sums, tickets: LaunchWord
        super().__init__(params, backup, table, hparams, ctypes.addressof(self._words))
        block, device = self._in_place_block if backup is None else self._block, params[0].get_device()
        partials = _function("partials_cuda")(block[0])
        self._partials = torch.empty(max(partials, 1), dtype=torch.float64, device=params[0].device)
        self._tickets = torch.zeros(2, dtype=torch.int32, device=params[0].device)
        self._words[:] = [device, 0, _address(self._partials), _address(self._tickets)]
        self._stream = partial(_raw_stream, device)

    def _locate(self, grads: Sequence[Tensor]) -> None:
        super()._locate(grads)
        self._words[1] = self._stream()


def _raw_stream(device: int) -> int:
    """Return the address of the device's current stream."""
    return int(torch._C._cuda_getCurrentRawStream(device))


@functools.cache
def _rule(name: str, suffix: str) -> int:
    """Return the address of the compiled rule with this name. Raises RuntimeError if the library has no such rule."""
    address = _function("rule" + suffix)(name.encode())
    if address is None:
        raise RuntimeError(f"the compiled kernels have no rule {name!r}; `{build.COMMAND}` compiles them anew")
    return int(address)
