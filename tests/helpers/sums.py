"""Sums of single clients."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from fastsam.fed.sums.fixed_point import FixedPointAggregate


def add_client_(
    aggregate: FixedPointAggregate,
    weight: int,
    mean: Mapping[str, Tensor],
    total: Mapping[str, Tensor],
    numbers: Mapping[str, float],
) -> str | None:
    """Add one client, and return the reason why it was left out, or None."""
    means, totals = ({name: x[None] for name, x in vectors.items()} for vectors in (mean, total))
    return aggregate.add_rows([weight], means, totals, {name: [value] for name, value in numbers.items()}).get(0)
