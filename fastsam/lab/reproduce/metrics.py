"""The numbers in the cells of the papers' tables, computed from our runs."""

from __future__ import annotations

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
    """A kind of cell. Accuracies without `spread` show the standard deviation over the seeds."""

    head: str  # text in the head of a column
    key: str  # name of the number in a run's summary
    form: str  # format of the number
    unit: int = 1  # factor of the number
    spread: str = ""  # name of a second number, shown in parentheses
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
    "accuracy": Metric("test accuracy (%)", "accuracy_final", ".2f", 100, direction=1),
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


def values_by_seed(metric: Metric, groups: Groups, target: float | None, key: str = "") -> dict[int, float | None]:
    """Return the number of each seed that has a run in every part, `metric.key` by default: the mean over the parts.

    It is None if a run has no number, because it did not reach the target.
    """
    by_seed = [{run.seed: metric.number(key or metric.key, run, target) for run in group} for group in groups]
    seeds = sorted(set.intersection(*map(set, by_seed)))
    rows = {seed: [part[seed] for part in by_seed] for seed in seeds}
    return {s: None if None in row else float(np.mean([v for v in row if v is not None])) for s, row in rows.items()}


def cell(
    metric: Metric, groups: Groups, base: Groups, target: float | None, seeds: int = 0
) -> tuple[float | None, str]:
    """Return the number (mean over the seeds; None if a finished run has none) and the text of a cell.

    Args:
        metric: kind of the cell.
        groups: runs of the algorithm.
        base: runs of FedAvg.
        target: accuracy in 0..1 of the column.
        seeds: number of requested seeds. The text has the number of seeds that it is of, if it is smaller.
    """
    values, base_values = values_by_seed(metric, groups, target), values_by_seed(metric, base, target)
    numbers = [v for v in values.values() if v is not None]
    if not numbers:
        return None, DASH
    count, mean = len(values), float(np.mean(numbers))
    text, is_whole = format(mean, metric.form), len(numbers) == len(values)
    if not is_whole:
        text = " / ".join(DASH if v is None else format(v, metric.form) for v in values.values())
    elif metric.is_multiple or metric.shows_multiple:
        pairs = [(v, base_values[seed]) for seed, v in values.items() if seed in base_values]
        has_all = bool(pairs) and all(b is not None for _, b in pairs)
        count = len(pairs) if has_all else count
        multiple = float(np.divide(*np.mean(np.array(pairs, dtype=float), axis=0))) if has_all else None
        if metric.is_multiple:
            text = DASH if multiple is None else f"{multiple:.4g}x"
        elif multiple is not None:
            text += f" ({multiple:.2f}x)"
    elif metric.spread:
        spreads = [v for v in values_by_seed(metric, groups, target, metric.spread).values() if v is not None]
        text += f" ({format(float(np.mean(spreads)), metric.form)})" if spreads else ""
    elif count > 1 and metric.direction > 0:
        text += f" ± {format(float(deviation(numbers)), metric.form)}"
    return mean if is_whole else None, text + (f" ({count} of {seeds} seeds)" if count < seeds else "")
