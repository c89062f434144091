"""A user's function in place of the mean of the deltas (`aggregation=function`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fastsam.fed.aggregation.base import RobustAggregator

Aggregation = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class FunctionRule(RobustAggregator):
    """The rule of a function that takes the deltas `[n, row_size]` of a round's clients and their weights, float64
    `[n]`, and returns one row `[row_size]`. Clients are in ascending order of their ids."""

    function: Aggregation
    supports_weights: ClassVar[bool] = True
    only_deltas: ClassVar[bool] = True

    def __post_init__(self) -> None:
        name = getattr(self.function, "__name__", type(self.function).__name__)
        object.__setattr__(self, "name", name)

    def mean(self, rows: Sequence[Tensor], weights: Sequence[int]) -> Tensor:
        """Return what the function returns, float64.

        Raises:
            ValueError: it is not a finite row, or the function raised an error.
        """
        deltas = torch.stack(list(rows))
        try:
            row = self.function(deltas, torch.tensor(weights, dtype=torch.float64, device=deltas.device))
        except Exception as error:
            raise ValueError(f"aggregation={self.name} failed: {type(error).__name__}: {error}") from error
        if not isinstance(row, Tensor) or row.shape != rows[0].shape or not row.is_floating_point():
            kind = f"{row.dtype} {list(row.shape)}" if isinstance(row, Tensor) else type(row).__name__
            raise ValueError(f"aggregation={self.name} must return one row, {list(rows[0].shape)} floats; got {kind}")
        if not row.isfinite().all():
            raise ValueError(f"aggregation={self.name} returned NaN or infinity, of deltas that are finite")
        return row.double()
