"""Rows of a user's algorithm keep the padding between parameters at zero: looked at when they come for the first
time."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from fastsam.fed.step.local_update import LocalUpdate
from fastsam.fed.step.parameter_layout import ParameterLayout


def check_padding(vectors: Mapping[str, Tensor], layout: ParameterLayout, what: str) -> None:
    """Raise ValueError for a finite number other than zero in the padding of rows `[..., row_size]`.

    Numbers that are not finite are handled elsewhere: their client is excluded, or the run stops with that reason.
    """
    padding = layout.padding
    for name, x in vectors.items():
        if x.dim() == 0 or x.shape[-1] != layout.row_size or not x.is_floating_point():
            continue
        found = x[..., padding.to(x.device)]
        if bool((found.isfinite() & (found != 0)).any()):
            raise ValueError(
                f"{what} has numbers in the padding of {name!r}, which would enter its norms: between parameters a row "
                f"is zero. Draw random "
                "numbers into the views of round.layout.unflatten(row), or make the row of a vector, "
                "round.layout.row(vector)"
            )


def check_padding_of_step(step: LocalUpdate, layout: ParameterLayout) -> None:
    """As `check_padding`, of the vectors of a LocalUpdate."""
    vectors = {name: getattr(step, name) for name in step.constants.vectors}
    check_padding(vectors, layout, "the LocalUpdate of local_update")
