"""What a robust rule is: it makes of the rows that the clients of a round send what takes the place of their mean.

A subclass with a `name`, in a module of this folder, is a rule: a run's `aggregation` takes the name, and after a colon
the rule's one number where it has one ("trimmed_mean:0.1"). Rows come as a list in the order of the clients' numbers,
never in that of their arrival, so a rule's bits are those of its rows.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

_BLOCK = 2**16  # columns that are looked at together: what a rule needs beside the rows stays small


@dataclass(frozen=True)
class Rule(ABC):
    """The base class of rules. Both methods get the rows of the n >= 1 clients that were not excluded.

    Attributes:
        supports_weights: the rule takes the run's weights, and so `weighting="samples"`.
        chooses: the rule leaves whole clients out.
        only_deltas: the rule is for deltas. Other uploads have their weighted mean.
    """

    name: ClassVar[str]
    supports_weights: ClassVar[bool] = False
    chooses: ClassVar[bool] = False
    only_deltas: ClassVar[bool] = False

    def __init_subclass__(cls) -> None:
        if "name" in vars(cls):
            registry[cls.name] = cls

    def chosen(self, displacements: Sequence[Tensor]) -> list[int]:
        """The places, ascending, of the clients that count, by their displacements `[row_size]`: of all unless a rule
        chooses."""
        return list(range(len(displacements)))

    def mean(self, rows: Sequence[Tensor], weights: Sequence[int]) -> Tensor:
        """What takes the place of the mean of one upload, float64: of the rows `[...]` of those who were chosen, and
        their weights."""
        total = torch.zeros_like(rows[0], dtype=torch.float64)
        for row, weight in zip(rows, weights, strict=True):
            total.add_(row, alpha=weight)
        return total.div_(sum(weights))


registry: dict[str, type[Rule]] = {}  # the rules by name, as they are defined


def middle(rows: Sequence[Tensor], k: int) -> Tensor:
    """The mean, in every element by itself, of what is left of the rows without the k largest and the k smallest
    values; float64."""
    flat = [row.reshape(-1) for row in rows]
    out = torch.empty(len(flat[0]), dtype=torch.float64, device=flat[0].device)
    for at in range(0, len(out), _BLOCK):
        block = torch.stack([row[at : at + _BLOCK] for row in flat]).sort(dim=0).values
        out[at : at + _BLOCK] = block[k : len(rows) - k].double().mean(0)
    return out.view(rows[0].shape)


def norms(rows: Sequence[Tensor]) -> list[float]:
    """Of each row, in float64, which has room for the squares of all that float32 holds."""
    return [float(torch.linalg.vector_norm(row, dtype=torch.float64)) for row in rows]
