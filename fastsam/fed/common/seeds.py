"""Random numbers as functions of their purpose: (seed, round, client, step, purpose). They do not depend on the order
in which clients run."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import numpy as np
import torch
from torch import Tensor

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

    The order is in the first `size` columns of the row. It is a function of the number, the size and `parts` only.
    Random 32-bit keys are sorted; equal keys keep their order.

    Args:
        numbers: such as client ids, 0 to 2^32 - 1.
        sizes: one size for each number.
        *parts: the purpose of the random numbers.
    """
    longest = max(sizes, default=0)
    counters = np.zeros((4, len(numbers), -(-longest // 4)), np.uint32)
    counters[0] = np.arange(counters.shape[2], dtype=np.uint32)
    counters[1] = np.array(numbers, np.uint32)[:, None]
    words = philox(derive(*parts), counters).transpose(1, 2, 0).reshape(len(numbers), -1)[:, :longest]
    keys, places = np.empty((len(numbers), longest), np.uint64), np.arange(longest, dtype=np.uint32)
    halves = keys.view(np.uint32).reshape(*keys.shape, 2)  # the low one first: all that torch runs on is little-endian
    halves[..., 0], halves[..., 1] = places, words
    if min(sizes, default=0) < longest:
        keys[places >= np.array(sizes)[:, None]] |= np.uint64(2**64 - 2**32)  # after the keys that count
    keys.sort(axis=1)
    halves[..., 1] = 0
    return torch.from_numpy(keys.view(np.int64))


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
