"""All clients' samples in one place, where they are pairs of tensors that are alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import gcd, lcm

import torch
from torch import Tensor

from fastsam.fed.clients.pairs import ALIGNMENT, Pair

LARGEST = 256 * 2**20  # bytes: what there is beside the user's own tensors


@dataclass(frozen=True)
class Store:
    """x, y: `[samples, ...]`, those of all clients; between two clients there may be some of nobody. begins: each client's first."""

    x: Tensor
    y: Tensor
    begins: Sequence[int]


def stored(pairs: Sequence[Pair]) -> tuple[list[Pair], Store | None]:
    """The pairs as views of one store, each at a multiple of the alignment.

    As they were, without a store, when samples of different clients differ in shape or dtype, or are too many for a second copy.
    """
    if len({(x.shape[1:], x.dtype, y.shape[1:], y.dtype) for x, y in pairs}) > 1:
        return list(pairs), None
    sizes = [len(y) for _, y in pairs]
    if sum(sizes) * sum(t[0].nbytes for t in pairs[0]) > LARGEST:
        return list(pairs), None
    made = store_of(torch.cat([x for x, _ in pairs]), torch.cat([y for _, y in pairs]), sizes)
    return (list(pairs), None) if made is None else made


def store_of(x: Tensor, y: Tensor, sizes: Sequence[int]) -> tuple[list[Pair], Store] | None:
    """The clients' samples, which lie behind each other in x and y, as views of a store; None where it would be too large, or holds nothing."""
    rows = [t[0].nbytes for t in (x, y)]
    if not all(rows):
        return None
    unit = lcm(*(ALIGNMENT // gcd(ALIGNMENT, row) for row in rows))
    gaps = [-n % unit for n in sizes]
    begins = [0, *accumulate(n + gap for n, gap in zip(sizes, gaps, strict=True))]
    if begins[-1] * sum(rows) > LARGEST:
        return None
    if any(gaps):
        moved = torch.tensor(begins[:-1]) - torch.tensor([0, *accumulate(sizes)][:-1])
        places = torch.arange(len(y)) + moved.repeat_interleave(torch.tensor(sizes))
        x, y = (t.new_zeros(begins[-1], *t.shape[1:]).index_copy_(0, places.to(t.device), t) for t in (x, y))
    parts = [n for pair in zip(sizes, gaps, strict=True) for n in pair]
    views = (t.split_with_sizes(parts)[::2] for t in (x, y))
    return list(zip(*views, strict=True)), Store(x, y, begins[:-1])
