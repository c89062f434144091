"""Rows of a user's algorithm keep the padding between parameters at zero: looked at when they come for the first
time."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from fastsam.fed.step.local_update import VECTORS, LocalUpdate
from fastsam.fed.step.rows import Rows


def check_padding(vectors: Mapping[str, Tensor], rows: Rows, what: str) -> None:
    """Raises ValueError for a finite number other than zero in the padding of one that is rows `[..., length]`.

    (What is not finite has another end: its client is excluded, or the run stops with that reason.)
    """
    padding = rows.padding
    for name, x in vectors.items():
        if x.dim() == 0 or x.shape[-1] != rows.length or not x.is_floating_point():
            continue
        found = x[..., padding.to(x.device)]
        if bool((found.isfinite() & (found != 0)).any()):
            raise ValueError(
                f"{what} has numbers in the padding of {name!r}, which would enter its norms: between parameters a row "
                f"is zero. Draw random "
                "numbers into the views of round.rows.unflatten(row), or make the row of a vector, "
                "round.rows.row(vector)"
            )


def check_padding_of_step(step: LocalUpdate, rows: Rows) -> None:
    """As `check_padding`, of the vectors of a LocalUpdate."""
    vectors = {name: x for name in VECTORS if (x := getattr(step, name)) is not None}
    check_padding(vectors, rows, "the LocalUpdate of local_update")
    if step.then is not None:
        check_padding_of_step(step.then, rows)
