"""The numbers in the cells of the papers' tables, computed from our runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
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


def seeds_of(column: Column, outcomes: Mapping[Part, Outcome]) -> list[int]:
    """Return the seeds of a column's runs, failed runs included."""
    return sorted({seed for part in column.parts for seed in outcomes[part].seeds})


def values_by_seed(metric: Metric, groups: Groups, target: float | None, key: str = "") -> dict[int, float | None]:
    """Return the number of each seed that has a run in every part, `metric.key` by default: the mean over the parts.

    It is None if a run has no number, because it did not reach the target.
    """
    by_seed = [{run.seed: metric.number(key or metric.key, run, target) for run in group} for group in groups]
    values: dict[int, float | None] = {}
    for seed in sorted(set.intersection(*(set(part) for part in by_seed))):
        numbers = [v for part in by_seed if (v := part[seed]) is not None]
        values[seed] = float(np.mean(numbers)) if len(numbers) == len(by_seed) else None
    return values


def failed_seeds(groups: Groups, seeds: Iterable[int] = ()) -> tuple[int, ...]:
    """Return the seeds without a run in a part. `seeds` are the requested seeds."""
    present_seeds: list[set[int]] = [{run.seed for run in group} for group in groups]
    return tuple(sorted({*seeds}.union(*present_seeds) - present_seeds[0].intersection(*present_seeds)))


def failure_text(seeds: Sequence[int], owner: str = "") -> str:
    """Return "seed 1 failed", or "" without seeds. `owner` is the algorithm if it is not the cell's."""
    return f"seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}{owner} failed" if seeds else ""


def cell(
    metric: Metric, groups: Groups, base: Groups, target: float | None, seeds: Iterable[int] = ()
) -> tuple[float | None, str]:
    """Return the number (mean over the seeds; None if a finished run has none) and the text of a cell.

    Args:
        metric: kind of the cell.
        groups: runs of the algorithm.
        base: runs of FedAvg.
        target: accuracy in 0..1 of the column.
        seeds: requested seeds. The text names seeds without a run.
    """
    seeds = tuple(seeds)
    values = values_by_seed(metric, groups, target)
    numbers = [v for v in values.values() if v is not None]
    if not numbers:
        return None, DASH
    mean = float(np.mean(numbers))
    failure = failure_text(failed_seeds(groups, seeds))
    note = f" ({failure})" if failure else ""
    if len(numbers) < len(values):
        return None, " / ".join(DASH if v is None else format(v, metric.form) for v in values.values()) + note
    multiple, base_failure = _multiple(metric, values, base, target, failed_seeds(groups, seeds), seeds)
    if metric.is_multiple:
        note = note or (f" ({base_failure})" if base_failure else "")
        return mean, DASH if multiple is None else f"{multiple:.4g}x{note}"
    text = format(mean, metric.form)
    if metric.spread:
        spreads = [v for v in values_by_seed(metric, groups, target, metric.spread).values() if v is not None]
        text += f" ({format(float(np.mean(spreads)), metric.form)})" if spreads else ""
    if metric.shows_deviation and len(values) > 1:
        text += f" ± {format(float(deviation(numbers)), metric.form)}"
    if metric.shows_multiple and multiple is not None:
        text += f" ({multiple:.2f}x{f', {base_failure}' if base_failure else ''})"
    return mean, text + note


def _multiple(
    metric: Metric, values: Mapping[int, float | None], base: Groups, target: float | None,
    own_failed_seeds: Sequence[int], seeds: Sequence[int],
) -> tuple[float | None, str]:  # fmt: skip
    """Return the multiple of FedAvg's number over the seeds that both have, and FedAvg's further failed seeds as text.

    The multiple is None if a run of FedAvg has no number.
    """
    if not (metric.shows_multiple or metric.is_multiple):
        return None, ""
    base_values = values_by_seed(metric, base, target)
    common_seeds = [seed for seed in values if seed in base_values]
    pairs = [(values[seed], base_values[seed]) for seed in common_seeds]
    numbers = [(v, b) for v, b in pairs if v is not None and b is not None]
    if not numbers or len(numbers) < len(pairs):
        return None, ""
    own_numbers, base_numbers = zip(*numbers, strict=True)
    base_failed_seeds = [seed for seed in failed_seeds(base, seeds) if seed not in own_failed_seeds]
    return float(np.mean(own_numbers)) / float(np.mean(base_numbers)), failure_text(base_failed_seeds, " of FedAvg")
