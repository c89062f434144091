"""The end of a round on several ranks: one buffer of integers holds all sums, and one all-reduce adds it up.

The buffer holds the limbs of all sums (`fixed_point`) and some counts. The ranks must agree on the positions in it.
They use the positions of earlier rounds, which are equal on all ranks. A rank that has a new sum says so in the buffer;
then all ranks exchange what they have, and a second all-reduce adds up the new sums. That happens in the first round,
and when a client is the first to upload a name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

import torch
from torch import Tensor

from fastsam.fed.sums.fixed_point import FixedPointAggregate, Key, Shape
from fastsam.fed.sums.ranks import Ranks

_ALIGNMENT = 8  # integers: 64 bytes, as torch allocates


class Exchange:
    """The all-reduce of the sums at the end of every round: `open` before the round, `all_reduce` after this rank's
    clients.

    With one rank it does nothing.

    Args:
        ranks: the processes of the run.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.shapes: dict[Key, Shape] = {}
        self.buffer = torch.zeros(0, dtype=torch.int64)

    def open(self, counts: int, like: Tensor) -> dict[Key, Tensor]:
        """Places for the sums of a round: zeros, int64 `[2, *shape]`, on the device of `like`. counts: how many
        `all_reduce` will be given."""
        if self.ranks.size == 1:
            return {}
        ends = [_align(3 + counts + len(self.shapes))]
        for shape in self.shapes.values():
            ends.append(ends[-1] + _align(2 * prod(shape)))
        self.buffer = torch.zeros(ends[-1], dtype=torch.int64, device=like.device)
        return {
            key: self.buffer[at : at + 2 * prod(shape)].view(2, *shape)
            for at, (key, shape) in zip(ends, self.shapes.items(), strict=False)
        }

    def all_reduce(self, aggregate: FixedPointAggregate, counts: Sequence[int]) -> list[int]:
        """Make `aggregate` the sums of all ranks, and return the sums of `counts`; collective.

        Raises:
            ValueError: two ranks hold vectors of one name and different shapes.
            RankError: a rank has died.
        """
        local_shapes = aggregate.shapes(self.buffer)
        agrees = [local_shapes.get(key) == shape for key, shape in self.shapes.items()]
        new = sum(agrees) < len(local_shapes)
        head = torch.tensor([new, aggregate.num_clients, aggregate.weight, *counts, *agrees], dtype=torch.int64)
        self.buffer[: len(head)] = head
        self.ranks.sum_(self.buffer)
        new, clients, weight, *sums = self.buffer[: len(head)].tolist()
        if new:
            shapes = self._settle(aggregate, local_shapes)
        else:
            shapes = {key: shape for (key, shape), n in zip(self.shapes.items(), sums[len(counts) :], strict=True) if n}
        aggregate.become(shapes, clients, weight, self.buffer)
        return sums[: len(counts)]

    def _settle(self, aggregate: FixedPointAggregate, local_shapes: Mapping[Key, Shape]) -> dict[Key, Shape]:
        """Add up the sums that had no position, and return the positions for the sums of this round."""
        shapes: dict[Key, Shape] = {}
        for rank_shapes in self.ranks.gather(local_shapes):
            for key, shape in rank_shapes.items():
                if shapes.setdefault(key, shape) != shape:
                    raise ValueError(
                        f"the upload {key[1]!r} must have one shape for all clients, got {shapes[key]} and {shape}"
                    )
        shapes = dict(sorted(shapes.items()))
        self.ranks.add_(
            [aggregate.limbs(key, shape, self.buffer) for key, shape in shapes.items() if self.shapes.get(key) != shape]
        )
        self.shapes = shapes
        return shapes


def _align(n: int) -> int:
    return -(-n // _ALIGNMENT) * _ALIGNMENT
