"""The numbers in the cells of the papers' tables, computed from our runs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from fastsam.fed.algorithms import registry
from fastsam.fed.rundir.result import to_target
from fastsam.lab.plots.curves import deviation
from fastsam.lab.report.finished import FinishedRun
from fastsam.lab.reproduce.runner import Outcome
from fastsam.lab.reproduce.table import Column, Part

DASH = "–"
# The runs of one algorithm, one list (over the seeds) per part of a column.
Groups = Sequence[Sequence[FinishedRun]]


@dataclass(frozen=True)
class Metric:
    """A kind of cell."""

    head: str  # text in the head of a column
    key: str  # name of the number in a run's summary
    form: str  # format of the number
    unit: int = 1  # factor of the number
    spread: str = ""  # name of a second number, shown in parentheses
    shows_deviation: bool = False  # show the standard deviation over seeds
    shows_multiple: bool = False  # show the multiple of FedAvg's number after the number, as in "1.26x"
    is_multiple: bool = False  # show this multiple in place of the number
    uses_target: bool = False  # the number counts until the column's target was reached
    direction: int = -1  # 1 if a larger number is better, -1 if a smaller number is better

    def number(self, key: str, run: FinishedRun, target: float | None) -> float | None:
        """Return a number of a run, or None if the run has none. `target` is the accuracy in 0..1 of the column."""
        if key == "stored_vectors":  # that a client receives or keeps between rounds, as declared
            algorithm = registry[run.algorithm](**run.summary["hyperparameters"])
            return algorithm.download_vectors + algorithm.client_vectors
        number = to_target(run.history, target)[key] if self.uses_target else run.summary.get(key)
        return None if number is None else self.unit * number


METRICS: Mapping[str, Metric] = {
    "accuracy": Metric("test accuracy (%)", "accuracy_final", ".2f", 100, shows_deviation=True, direction=1),
    "train": Metric("train", "train_accuracy_mean", ".2f", 100, "train_accuracy_std", direction=1),
    "validation": Metric("validation", "client_accuracy_mean", ".2f", 100, "client_accuracy_std", direction=1),
    "rounds": Metric("rounds", "rounds_to_target", ".0f", uses_target=True),
    "relative_rounds": Metric("rounds", "rounds_to_target", ".1f", shows_multiple=True, uses_target=True),
    "relative_traffic": Metric("traffic", "megabytes_to_target", ".2f", shows_multiple=True, uses_target=True),
    "relative_compute": Metric("computing time", "seconds_to_target", ".2f", shows_multiple=True, uses_target=True),
    "memory": Metric("stored memory", "stored_vectors", ".2f", is_multiple=True),
    "traffic": Metric("traffic", "megabytes", ".2f", is_multiple=True),
    "backprops": Metric("back-propagations", "backprops", ".2f", is_multiple=True),
    "seconds": Metric("seconds per round", "seconds_per_round", ".4f", shows_multiple=True),
}


def groups_of(column: Column, algorithm: str, outcomes: Mapping[Part, Outcome]) -> Groups:
    """Return the runs of an algorithm in a column, by part."""
    return [[run for run in outcomes[part].runs if run.algorithm == algorithm] for part in column.parts]


def value(metric: Metric, groups: Groups, target: float | None, key: str = "") -> list[float | None]:
    """Return the number of each seed, `metric.key` by default: the mean over the parts.

    It is None if a part has no number, because its run failed or did not reach the target.
    """
    by_seed = [{run.seed: metric.number(key or metric.key, run, target) for run in group} for group in groups]
    values = []
    for seed in dict.fromkeys(seed for part in by_seed for seed in part):
        part_numbers = [part.get(seed) for part in by_seed]
        numbers = [v for v in part_numbers if v is not None]
        values.append(float(np.mean(numbers)) if len(numbers) == len(part_numbers) else None)
    return values


def cell(metric: Metric, groups: Groups, base: Groups, target: float | None) -> tuple[float | None, str]:
    """Return the number (mean over the seeds; None if a seed has none) and the text of a cell. `base` are FedAvg's
    runs."""
    values = value(metric, groups, target)
    numbers = [v for v in values if v is not None]
    if not numbers:
        return None, DASH
    mean = float(np.mean(numbers))
    if len(numbers) < len(values):
        return None, " / ".join(DASH if v is None else format(v, metric.form) for v in values)
    base_numbers: list[float] = []
    if metric.shows_multiple or metric.is_multiple:
        base_numbers = [v for v in value(metric, base, target) if v is not None]
    multiple = mean / float(np.mean(base_numbers)) if base_numbers else math.nan
    if metric.is_multiple:
        return mean, f"{multiple:.4g}x" if base_numbers else DASH
    text = format(mean, metric.form)
    if metric.spread:
        spreads = [v for v in value(metric, groups, target, metric.spread) if v is not None]
        text += f" ({format(float(np.mean(spreads)), metric.form)})" if spreads else ""
    if metric.shows_deviation and len(values) > 1:
        text += f" ± {format(float(deviation(numbers)), metric.form)}"
    if base_numbers and len(base_numbers) == len(values):
        text += f" ({multiple:.2f}x)"
    return mean, text
