"""What stacked clients need besides the kernels on their rows, on the CPU: products of small matrices, seeds and random orders."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Sequence
from functools import cache
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor

from . import native

Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]

# Multiplications of a call from which it is worth its while, and of a matrix up to which it was measured (see docs/kernels.md).
_FEWEST, _MOST = 2**16, 2**21

_LONG = 2**32 // 20  # orders that torch draws with more bits


def product_of(a: Tensor, b: Tensor) -> Product | None:
    """`f(a, b, bias)` for matrices like these, where there is one that is faster than torch's: `a @ b`, plus `bias` if that is not None.

    a, b: `[rows, m, k]` and `[rows, k, n]` in any strides; bias: `[rows, m, n]`, or broadcast to it. An element is the sum of its products
    in the order of k, the bias added last: the same bits with any other rows beside it, and in any order of memory.
    """
    if a.device.type != "cpu" or a.dtype != torch.float32 or b.dtype != a.dtype or not a.dim() == b.dim() == 3:
        return None
    (rows, m, k), n = a.shape, b.shape[2]
    if not _FEWEST <= rows * m * k * n <= rows * _MOST or native.why_not("cpu") is not None:
        return None
    return _product()


@cache
def _product() -> Product:
    @torch.library.register_fake("fastsam::product")
    def _(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
        return a.new_empty(a.shape[0], a.shape[1], b.shape[2])

    made: Product = torch.ops.fastsam.product.default
    return made


def hashes(before: str, values: Sequence[int], after: str) -> list[int]:
    """A number of 63 bits for each value: the BLAKE2b hash, of 8 bytes, of `f"{before}{value}{after}"`, shifted right by one bit.

    before, after: without NUL.
    """
    try:
        given = array("q", values)
    except OverflowError:
        return _by_hashlib(before, values, after)
    if native.why_not("cpu") is not None:
        return _by_hashlib(before, values, after)
    made = array("q", bytes(given.itemsize * len(given)))
    _hashes()(before.encode(), after.encode(), given.buffer_info()[0], made.buffer_info()[0], len(given))
    return made.tolist()


def _by_hashlib(before: str, values: Sequence[int], after: str) -> list[int]:
    start, made = blake2b(before.encode(), digest_size=8), []
    for value in values:
        digest = start.copy()
        digest.update(f"{value}{after}".encode())
        made.append(int.from_bytes(digest.digest(), "little") >> 1)
    return made


@cache
def _hashes() -> Any:
    function = ctypes.CDLL(native.library()).fastsam_hashes
    function.argtypes = [ctypes.c_char_p] * 2 + [ctypes.c_void_p] * 2 + [ctypes.c_int64]
    function.restype = None
    return function


def random_orders(n: int, seeds: Sequence[int]) -> Tensor:
    """A random order of `range(n)` for each seed, int64 `[seeds, n]` on the CPU: what `torch.randperm` gives for a generator with that seed.

    seeds: 0 to 2^63 - 1; torch's generators use the low 32 bits.
    """
    orders = torch.empty(len(seeds), n, dtype=torch.int64, device="cpu")
    if n < _LONG and _drawn_as_by_torch():
        torch.ops.fastsam.orders_.default(orders, torch.tensor(seeds, dtype=torch.int64, device="cpu"))
    else:
        _by_torch(orders, seeds)
    return orders


def _by_torch(orders_: Tensor, seeds: Sequence[int]) -> None:
    generator = torch.Generator("cpu")
    for seed, order in zip(seeds, orders_.unbind(), strict=True):
        torch.randperm(len(order), generator=generator.manual_seed(seed), out=order, device="cpu")


@cache
def _drawn_as_by_torch() -> bool:
    """Whether the compiled orders are there, and those of this version of torch: how it shuffles is not promised."""
    if native.why_not("cpu") is not None:
        return False
    seeds = [0, 1, 2**32 - 1, 2**62 + 12345]
    ours, theirs = torch.empty(2, len(seeds), 1000, dtype=torch.int64, device="cpu")
    torch.ops.fastsam.orders_.default(ours, torch.tensor(seeds, device="cpu"))
    _by_torch(theirs, seeds)
    return torch.equal(ours, theirs)
