"""The names of the measures, what each adds to a round's record, and their settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastsam.fed.common.checks import integer, number

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


@dataclass(frozen=True)
class Options:
    """Settings of the measures.

    Args:
        rho: radius of the sharpness and of the margin's perturbation.
        steps: number of steps of the projected ascent.
        samples: number of training samples of the loss, a fixed subset with a part of every client; None: all.
        every: rounds between measured rounds. The last round is always measured.
        margin: gamma of the margin risk.
        iterations: largest number of power iterations.

    Raises:
        ValueError: a value is out of range.
    """

    rho: float = 0.1
    steps: int = 20
    samples: int | None = None
    every: int = 1
    margin: float = 0.1
    iterations: int = 30

    def __post_init__(self) -> None:
        number("measure_options: rho", self.rho, above=0)
        number("measure_options: margin", self.margin, at_least=0, at_most=1)
        for name in ("steps", "every", "iterations"):
            integer(f"measure_options: {name}", getattr(self, name), at_least=1)
        if self.samples is not None:
            integer("measure_options: samples", self.samples, at_least=1)


def check(names: Sequence[str], options: Mapping[str, Any]) -> Options:
    """The options. Raises ValueError for a name or an option that does not exist."""
    if isinstance(names, str):
        raise ValueError(f"measures must be a list of names, got the string {names!r}; write [{names!r}]")
    if not isinstance(options, Mapping):
        raise ValueError(f"measure_options must be a dict, got {type(options).__name__}")
    unknown = [name for name in names if not isinstance(name, str) or name not in NAMES]
    if unknown:
        raise ValueError(f"measures: unknown measure {unknown[0]!r}; choose from {', '.join(NAMES)}")
    if options and not names:
        raise ValueError("measure_options are given, but no measures; name what to measure, or leave the options out")
    known = Options.__dataclass_fields__
    wrong = [name for name in options if name not in known]
    if wrong:
        raise ValueError(f"measure_options: unknown option {wrong[0]!r}; choose from {', '.join(known)}")
    return Options(**options)
