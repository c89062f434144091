"""The numbers in the cells of the papers' tables, computed from our runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from fastsam.fed.algorithms import registry
from fastsam.fed.rundir.result import to_target
from fastsam.lab.plots.curves import deviation
from fastsam.lab.report import FinishedRun
from fastsam.lab.reproduce.runner import Outcome
from fastsam.lab.reproduce.table import Column, Part

DASH = "–"
Number = Callable[[FinishedRun, float | None], float | None]
# The runs of one algorithm, one list (over the seeds) per part of a column.
Groups = Sequence[Sequence[FinishedRun]]


@dataclass(frozen=True)
class Metric:
    """A kind of cell."""

    head: str  # text in the head of a column
    number: Number  # function from a run and the column's target to the number
    form: str  # format of the number
    spread: Number | None = None  # function for a second number, shown in parentheses
    shows_deviation: bool = False  # show the standard deviation over seeds
    shows_multiple: bool = False  # show the multiple of FedAvg's number after the number, as in "1.26x"
    is_multiple: bool = False  # show this multiple in place of the number
    uses_target: bool = False  # the number counts until the column's target was reached
    direction: int = -1  # 1 if a larger number is better, -1 if a smaller number is better


def _percent(key: str) -> Number:
    def number(run: FinishedRun, target: float | None) -> float | None:
        value = run.summary.get(key)
        return None if value is None else 100 * value

    return number


def _summary_value(key: str) -> Number:
    return lambda run, target: run.summary.get(key)


def _target_value(key: str) -> Number:
    return lambda run, target: to_target(run.history, target)[key]


def _vector_count(run: FinishedRun, target: float | None) -> float:
    """Return the vectors of the model's size that a client receives or keeps between rounds, as declared."""
    algorithm = registry[run.algorithm](**run.summary["hyperparameters"])
    return algorithm.download_vectors + algorithm.client_vectors


METRICS: Mapping[str, Metric] = {
    "accuracy": Metric("test accuracy (%)", _percent("accuracy_final"), ".2f", shows_deviation=True, direction=1),
    "train": Metric("train", _percent("train_accuracy_mean"), ".2f", _percent("train_accuracy_std"), direction=1),
    "validation": Metric(
        "validation", _percent("client_accuracy_mean"), ".2f", _percent("client_accuracy_std"), direction=1
    ),
    "rounds": Metric("rounds", _target_value("rounds_to_target"), ".0f", uses_target=True),
    "relative_rounds": Metric(
        "rounds", _target_value("rounds_to_target"), ".1f", shows_multiple=True, uses_target=True
    ),
    "relative_traffic": Metric(
        "traffic", _target_value("megabytes_to_target"), ".2f", shows_multiple=True, uses_target=True
    ),
    "relative_compute": Metric(
        "computing time", _target_value("seconds_to_target"), ".2f", shows_multiple=True, uses_target=True
    ),
    "memory": Metric("stored memory", _vector_count, ".2f", is_multiple=True),
    "traffic": Metric("traffic", _summary_value("megabytes"), ".2f", is_multiple=True),
    "backprops": Metric("back-propagations", _summary_value("backprops"), ".2f", is_multiple=True),
    "seconds": Metric("seconds per round", _summary_value("seconds_per_round"), ".4f", shows_multiple=True),
}


def groups_of(column: Column, algorithm: str, outcomes: Mapping[Part, Outcome]) -> Groups:
    """Return the runs of an algorithm in a column, by part."""
    return [[run for run in outcomes[part].runs if run.algorithm == algorithm] for part in column.parts]


def value(metric: Metric, groups: Groups, target: float | None, number: Number | None = None) -> list[float | None]:
    """Return the number of each seed: the mean over the parts.

    It is None if a part has no number, because its run failed or did not reach the target.
    """
    by_seed = [{run.seed: (number or metric.number)(run, target) for run in group} for group in groups]
    values = []
    for seed in dict.fromkeys(seed for part in by_seed for seed in part):
        part_numbers = [part.get(seed) for part in by_seed]
        numbers = [v for v in part_numbers if v is not None]
        values.append(float(np.mean(numbers)) if len(numbers) == len(part_numbers) else None)
    return values


def cell(metric: Metric, groups: Groups, base: Groups, target: float | None) -> tuple[float | None, str]:
    """Return the number (mean over the seeds; None if a seed has none) and the text of a cell. base: FedAvg's runs."""
    values = value(metric, groups, target)
    numbers = [v for v in values if v is not None]
    if not numbers:
        return None, DASH
    mean = float(np.mean(numbers))
    if len(numbers) < len(values):
        return None, " / ".join(DASH if v is None else format(v, metric.form) for v in values)
    base_numbers = (
        [v for v in value(metric, base, target) if v is not None] if metric.shows_multiple or metric.is_multiple else []
    )
    if metric.is_multiple:
        return mean, f"{mean / float(np.mean(base_numbers)):.4g}x" if base_numbers else DASH
    text = format(mean, metric.form)
    if metric.spread is not None:
        spreads = [v for v in value(metric, groups, target, metric.spread) if v is not None]
        text += f" ({format(float(np.mean(spreads)), metric.form)})" if spreads else ""
    if metric.shows_deviation and len(values) > 1:
        text += f" ± {format(float(deviation(numbers)), metric.form)}"
    is_complete = base_numbers and len(base_numbers) == len(values)
    return mean, text + (
        f" ({mean / float(np.mean(base_numbers)):.2f}x)" if metric.shows_multiple and is_complete else ""
    )
