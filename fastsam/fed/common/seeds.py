"""Random numbers as functions of their purpose: (seed, round, client, step, purpose). They do not depend on the order
in which clients run."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from fastsam import ops

# Constants of Philox: number of rounds, multipliers, and the increments of the key. Its authors recommend 10 rounds and
# found no statistical test that 7 rounds fail. Orders of samples need no more.
_ROUNDS, _MAX_ROUNDS = 7, 10
_MULTIPLIERS = np.array([0xD2511F53, 0xCD9E8D57], np.uint64)
_WEYL = np.arange(_MAX_ROUNDS, dtype=np.uint64)[:, None] * np.array([0x9E3779B9, 0xBB67AE85], np.uint64)


def derive(*parts: int | str) -> int:
    """Return a number of 63 bits that depends on all parts and on nothing else. It is the same on every machine."""
    return int.from_bytes(blake2b(repr(parts).encode(), digest_size=8).digest(), "little") >> 1


def generator(*parts: int | str) -> torch.Generator:
    """Return a generator on the CPU, seeded with `derive(*parts)`, of which torch uses the low 32 bits."""
    result = torch.Generator()
    result.manual_seed(derive(*parts))
    return result


def permutation(n: int, *parts: int | str) -> Tensor:
    """Return a random order of `range(n)`, int64 `[n]` on the CPU."""
    return permutations([0], [n], *parts)[0]


def permutations(numbers: Sequence[int], sizes: Sequence[int], *parts: int | str) -> Tensor:
    """Return a random order of `range(size)` for each number, int64 `[numbers, longest]` on the CPU.

    The order is in the first `size` columns of the row; the other columns are undefined. It is a function of the
    number, the size and `parts` only. Random 32-bit keys are sorted; equal keys keep their order.

    Args:
        numbers: such as client ids, 0 to 2^32 - 1.
        sizes: one size for each number.
        *parts: the purpose of the random numbers.
    """
    longest = max(sizes, default=0)
    out = torch.empty(len(numbers), longest, dtype=torch.int64, device="cpu")
    clients = [(number, n, n, row * longest, 0) for row, (number, n) in enumerate(zip(numbers, sizes, strict=True))]
    write_orders(out.view(-1), clients, parts)
    return out


def write_orders(out: Tensor, clients: Sequence[tuple[int, int, int, int, int]], parts: Sequence[int | str]) -> None:
    """Write the orders of the samples of some clients into `out`, int64 `[.]` on the CPU, in one call.

    Args:
        out: memory of the orders.
        clients: for each client its number, the number of its samples, how many of its order are kept, their place in
            `out`, and the index of its first sample, which is added to the order.
        parts: the purpose of the random numbers; none for the stored order.
    """
    key = derive(*parts) if parts else None
    native_orders = ops.native_orders()
    if native_orders is not None:
        words = torch.frombuffer(array("q", chain.from_iterable(clients)), dtype=torch.int64)
        native_orders(out, words.view(-1, 5), key)
        return
    orders = None if key is None else _orders([c[0] for c in clients], [c[1] for c in clients], key)
    places = out.numpy()  # on short slices calls of numpy are several times faster than calls of torch
    for row, (_, _, kept, begin, first) in enumerate(clients):
        places[begin : begin + kept] = (np.arange(kept) if orders is None else orders[row, :kept]) + first


def _orders(numbers: Sequence[int], sizes: Sequence[int], key: int) -> np.ndarray:
    """Return random orders as `permutations` does, without compiled kernels."""
    longest = max(sizes, default=0)
    counters = np.zeros((4, len(numbers), -(-longest // 4)), np.uint32)
    counters[0] = np.arange(counters.shape[2], dtype=np.uint32)
    counters[1] = np.array(numbers, np.uint32)[:, None]
    words = philox(key, counters).transpose(1, 2, 0).reshape(len(numbers), -1)[:, :longest]
    keys, places = np.empty((len(numbers), longest), np.uint64), np.arange(longest, dtype=np.uint32)
    halves = keys.view(np.uint32).reshape(*keys.shape, 2)  # the low one first: all that torch runs on is little-endian
    halves[..., 0], halves[..., 1] = places, words
    if min(sizes, default=0) < longest:
        keys[places >= np.array(sizes)[:, None]] |= np.uint64(2**64 - 2**32)  # after the keys that count
    keys.sort(axis=1)
    halves[..., 1] = 0
    return keys.view(np.int64)


def philox(key: int, counters: np.ndarray, rounds: int = _ROUNDS) -> np.ndarray:
    """Return the random words of Philox4x32 with up to 10 rounds, uint32 `[4, ...]`.

    Args:
        key: 64 bits.
        counters: uint32 `[4, ...]`; each gives four random words.
        rounds: number of rounds.

    Source: Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", 2011.
    """
    shape = (2, *[1] * (counters.ndim - 1))
    multipliers = _MULTIPLIERS.reshape(shape)
    keys = (
        (np.array([key & 0xFFFFFFFF, key >> 32], np.uint64) + _WEYL[:rounds]).astype(np.uint32).reshape(rounds, *shape)
    )
    even, odd = counters[::2], counters[1::2]
    for one_key in keys:
        words = np.multiply(even, multipliers, dtype=np.uint64)[::-1].view(np.uint32)
        low, high = words[..., ::2], words[..., 1::2]
        even, odd = high ^ odd ^ one_key, low
    return np.stack([even, odd], 1).reshape(counters.shape)
