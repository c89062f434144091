"""The names of the measures, what each adds to a round's record, and their settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from fastsam.fed.algorithms.base import Aggregate, Round, State
from fastsam.fed.common.checks import integer, number
from fastsam.fed.common.option import NamedOptions, made_of, option
from fastsam.fed.update.results import ClientResults

# Each measure with its keys in a round's record.
NAMES: dict[str, tuple[str, ...]] = {
    "train": ("train_set_loss", "train_set_accuracy"),
    "sharpness": ("sharpness",),
    "sharpness_ascent": ("sharpness_ascent",),
    "perturbation_drift": ("perturbation_drift",),
    "consistency": ("consistency",),
    "smoothness": ("smoothness_global", "smoothness_clients", "hessian_norm"),
    "variances": ("sigma_l", "sigma_g"),
    "drifts": ("e_w", "e_delta"),
    "estimation_bias": ("estimation_bias",),
    "margin": ("margin_risk", "margin_risk_perturbed", "spectral_complexity"),
    "dual_gap": ("dual_gap",),
}

# Measures that take gradients of the loss over all samples.
OF_GRADIENTS = frozenset(NAMES) - {"train", "consistency", "drifts", "dual_gap"}


@dataclass(frozen=True)
class NamedMeasures(NamedOptions):
    """Measures of a run by name, with their settings (`measures=fed.NamedMeasures(["sharpness"], every=10)`).

    Raises:
        ValueError: a name is unknown, or a value is out of range.
    """

    names: Sequence[str] = option((), f"names of the measures: {', '.join(NAMES)}")
    rho: float = option(0.1, "radius of the sharpness and of the margin's perturbation")
    steps: int = option(20, "number of steps of the projected ascent")
    samples: int | None = option(None,
        "number of training samples of the loss, a fixed subset with a part of every client; none: all")  # fmt: skip
    every: int = option(1, "rounds between measured rounds; the last round is always measured")
    margin: float = option(0.1, "gamma of the margin risk")
    iterations: int = option(30, "largest number of power iterations")

    def __post_init__(self) -> None:
        if isinstance(self.names, str):
            raise ValueError(f"measures must be a list of names, got the string {self.names!r}; write [{self.names!r}]")
        object.__setattr__(self, "names", tuple(self.names))
        unknown = [name for name in self.names if not isinstance(name, str) or name not in NAMES]
        if unknown:
            raise ValueError(f"measures: unknown measure {unknown[0]!r}; choose from {', '.join(NAMES)}")
        number("measures: rho", self.rho, greater_than=0)
        number("measures: margin", self.margin, at_least=0, at_most=1)
        for name in ("steps", "every", "iterations"):
            integer(f"measures: {name}", getattr(self, name), at_least=1)
        if self.samples is not None:
            integer("measures: samples", self.samples, at_least=1)


def measures_by_name(measures: Any) -> NamedMeasures | None:
    """Return measures by name from a list of names, a table or a `NamedMeasures`, or None for a user's object.

    Raises:
        ValueError: a name or a setting is unknown, or there are settings and no names.
    """
    if isinstance(measures, NamedMeasures):
        return measures
    if isinstance(measures, Sequence):
        return NamedMeasures(measures)
    if not isinstance(measures, Mapping):
        return None
    options = made_of(NamedMeasures, measures, "measures")
    if measures and not options.names:
        raise ValueError("measures has settings, but no names. Name what to measure, or leave the settings out")
    return options


class Measures(Protocol):
    """Measures of a run. A user's measures get vectors `[..., P]` in torch's order (`fastsam.fed.measures.own`).

    Numbers of clients are added to the round's sums in any order. Numbers of rounds enter the records.

    With several ranks each rank has its own object: `clients` is called where clients trained, `round` on rank 0. An
    object that keeps more than numbers has a method `join(ranks, context)`, which is called on all ranks between the
    two.
    """

    def snapshots(self, round: int, steps: int) -> tuple[int, ...]:
        """Return the local steps (from 0, of `steps`) before which a row is kept (`ClientResults.snapshots`)."""

    def clients(
        self, old_state: State, results: ClientResults, context: Round
    ) -> Mapping[str, Sequence[float] | Tensor]:
        """Return numbers of n clients, n under each name. Their sums over all clients are `aggregate.scalar(name)` in
        `round`.

        A number that is not finite excludes its client.
        """

    def round(
        self, old_state: State, new_state: State, aggregate: Aggregate, context: Round
    ) -> dict[str, float | None]:
        """Return numbers for the round's record, from the server's states and the aggregate."""
