"""The base class of robust rules, which replace the mean over the clients of a round.

A subclass with a `name`, in a module of this folder, is a rule. A run's `aggregation` is the name, or the name and the
rule's number ("trimmed_mean:0.1"). Rows are in the order of the client ids, so a rule's bits do not depend on the order
in which clients finish.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import ClassVar

import torch
from torch import Tensor

_BLOCK = 2**16  # columns of a block, so that a rule needs little memory in addition to the rows


@dataclass(frozen=True)
class RobustAggregator(ABC):
    """The base class of rules. Both methods get the rows of the n >= 1 clients that were not excluded.

    Attributes:
        supports_weights: the rule takes the run's weights, and so `weighting="samples"`.
        only_deltas: the rule is for deltas. Other uploads have their weighted mean.
    """

    name: ClassVar[str]
    supports_weights: ClassVar[bool] = False
    only_deltas: ClassVar[bool] = False

    def __init_subclass__(cls) -> None:
        if "name" in vars(cls):
            registry[cls.name] = cls

    def select(self, displacements: Sequence[Tensor]) -> list[int]:
        """Return the ascending places of the clients that count, by their displacements `[row_size]`."""
        return list(range(len(displacements)))

    def mean(self, rows: Sequence[Tensor], weights: Sequence[int]) -> Tensor:
        """Return what replaces the mean of one upload, float64, from the rows of the chosen clients."""
        total = torch.zeros_like(rows[0], dtype=torch.float64)
        for row, weight in zip(rows, weights, strict=True):
            total.add_(row, alpha=weight)
        return total.div_(sum(weights))


registry: dict[str, type[RobustAggregator]] = {}  # the rules by name, as they are defined


def trimmed_mean(rows: Sequence[Tensor], k: int) -> Tensor:
    """Return the mean of each element without its k largest and k smallest values, float64."""
    flat = [row.reshape(-1) for row in rows]
    out = torch.empty(len(flat[0]), dtype=torch.float64, device=flat[0].device)
    for start in range(0, len(out), _BLOCK):
        block = torch.stack([row[start : start + _BLOCK] for row in flat]).sort(dim=0).values
        out[start : start + _BLOCK] = block[k : len(rows) - k].double().mean(0)
    return out.view(rows[0].shape)


def norms(rows: Sequence[Tensor]) -> list[float]:
    """Return the norm of each row in float64, which holds the squares of all float32 numbers."""
    return [float(torch.linalg.vector_norm(row, dtype=torch.float64)) for row in rows]


def count_of_share(share: float, n: int) -> int:
    """Return the least whole number that is `share * n` or more, without the product's rounding."""
    return ceil(share * n - 1e-9)
