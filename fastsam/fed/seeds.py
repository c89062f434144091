"""Random numbers as functions of what they are for: (seed, round, client, step, purpose), never of the order in which clients run."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b

import torch
from torch import Tensor


def derive(*parts: int | str) -> int:
    """A number of 63 bits that depends on all parts and on nothing else; the same on every machine."""
    return int.from_bytes(blake2b(repr(parts).encode(), digest_size=8).digest(), "little") >> 1


def generator(*parts: int | str) -> torch.Generator:
    """A generator on the CPU, seeded with `derive(*parts)`. (torch uses the low 32 bits of a seed: enough to shuffle with.)"""
    made = torch.Generator()
    made.manual_seed(derive(*parts))
    return made


def permutation(n: int, *parts: int | str) -> Tensor:
    """A random order of `range(n)`, int64 `[n]` on the CPU."""
    return torch.randperm(n, generator=generator(*parts))


def permutations(n: int, seeds: Iterable[int], *parts: int | str) -> Tensor:
    """`permutation(n, seed, *parts)` for each seed, int64 `[seeds, n]` on the CPU."""
    made, orders = torch.Generator(), []
    for seed in seeds:
        made.manual_seed(derive(seed, *parts))
        orders.append(torch.randperm(n, generator=made))
    return torch.stack(orders)
