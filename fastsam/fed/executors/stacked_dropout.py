"""Dropout of stacked clients: whether an element is kept is a function of the seed of the client's step, the number of
the call, and the element.

A client drops the same elements in any group of clients, by itself, in both passes of a step, and after a resume.
torch's generator has one sequence for all rows of a call, which depends on the group. `sequential` draws from that
generator, so it drops other elements.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten

# The distance of two states of SplitMix64, and the factors of its hash. Steele, Lea and Flood, "Fast splittable
# pseudorandom number generators", OOPSLA 2014, Figures 15 and 17 (variant 13).
_DISTANCE, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64


class StackedDropout(TorchDispatchMode):
    """While it is entered, below `torch.vmap`, dropout keeps the elements of `keeps`.

    Args:
        keys: the seed of each row, int64 `[rows]`, or of one client, `[]`. The rows are the first dimension of a draw.
    """

    def __init__(self, keys: Tensor) -> None:
        super().__init__()
        self._keys, self._calls = keys, 0

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is aten.bernoulli_.float:  # dropout on a CPU, of channels, of whole samples
            return args[0].copy_(self._keeps(args[0], args[1] if len(args) > 1 else kwargs.get("p", 0.5)))
        if func is aten.bernoulli.p:  # the same of rows that are mapped
            return self._keeps(args[0], args[1]).to(args[0].dtype)
        if func is aten.native_dropout.default and args[2] is not False:  # dropout on CUDA
            x, p, _ = args
            kept = self._keeps(x, 1 - p)
            return x * kept.to(x.dtype).mul(1 / (1 - p) if p < 1 else 0.0), kept
        if draws(func, args, kwargs):
            raise ValueError(
                f"a training pass draws random numbers by {func}. Stacked clients serve dropout only (F.dropout and "
                "its modules, bernoulli_ with one probability)"
            )
        return func(*args, **kwargs)

    def _keeps(self, x: Tensor, p: float) -> Tensor:
        """Return which elements of the next call are kept with probability p, bool like x."""
        if x.shape[: self._keys.dim()] != self._keys.shape:
            raise ValueError(f"a draw of shape {list(x.shape)} has no dimension for the {len(self._keys)} rows")
        self._calls += 1
        return keeps(self._keys, self._calls, x.shape[self._keys.dim() :], p)


@contextmanager
def stacked_dropout(keys: Tensor) -> Iterator[None]:
    """Let dropout in passes of rows keep the elements of `keeps`. On CUDA attention then runs operation by operation,
    because its kernels draw their own dropout."""
    is_cuda = keys.device.type == "cuda"
    attention: AbstractContextManager[object] = sdpa_kernel(SDPBackend.MATH) if is_cuda else nullcontext()
    with attention, StackedDropout(keys):
        yield


def keeps(keys: Tensor, call: int, shape: Sequence[int], p: float) -> Tensor:
    """Return which elements of a call are kept.

    Args:
        keys: a seed for each row, int64 `[rows]`, or of one client, `[]`.
        call: number of the call in the pass.
        shape: shape of the elements of a row.
        p: probability of an element to be kept.

    Returns:
        bool `[rows, *shape]`, or `shape`. Element i is kept if number i of SplitMix64, from the state that the seed and
        the call give, is in the lower part p of all numbers.
    """
    states = _mixed(keys ^ _wrapped(call * _DISTANCE)).view(*keys.shape, *[1] * len(shape))
    steps = torch.arange(1, torch.Size(shape).numel() + 1, device=keys.device) * _wrapped(_DISTANCE)
    return _mixed(states + steps.view(*shape)) < _wrapped(min(int(p * 2**64), 2**64 - 1) + 2**63)


def _mixed(x: Tensor) -> Tensor:
    """Return the hash of SplitMix64 without its last shift, which changes only the lower bits."""
    x = (x ^ _shift(x, 30)) * _FIRST
    return (x ^ _shift(x, 27)) * _SECOND


def _shift(x: Tensor, n: int) -> Tensor:
    """Return int64 numbers with their bits n places lower, and zeros above them."""
    return (x >> n) & ((1 << (64 - n)) - 1)


def _wrapped(n: int) -> int:
    """Return a whole number as int64 holds it."""
    return (n + 2**63) % 2**64 - 2**63


def draws(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return True for a call of an operation that draws random numbers. Attention without dropout draws none."""
    if torch.Tag.nondeterministic_seeded not in getattr(func, "tags", ()):
        return False
    names = [argument.name for argument in func._schema.arguments]
    values = {**dict(zip(names, args, strict=False)), **kwargs}
    return "dropout_p" not in names or values.get("dropout_p", 0.0) != 0
