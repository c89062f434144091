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

NONE = "–"
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
    seeds: bool = False  # show the standard deviation over seeds
    relative: bool = False  # show the multiple of FedAvg's number after the number, as in "1.26x"
    ratio: bool = False  # show this multiple in place of the number
    timed: bool = False  # the number counts until the column's target was reached
    better: int = -1  # 1 if a larger number is better, -1 if a smaller number is better


def _percent(key: str) -> Number:
    def number(run: FinishedRun, target: float | None) -> float | None:
        value = run.summary.get(key)
        return None if value is None else 100 * value

    return number


def _plain(key: str) -> Number:
    return lambda run, target: run.summary.get(key)


def _until(key: str) -> Number:
    return lambda run, target: to_target(run.history, target)[key]


def _stored_vectors(run: FinishedRun, target: float | None) -> float:
    """Return the vectors of the model's size that a client receives or keeps between rounds, as declared."""
    made = registry[run.algorithm](**run.summary["hyperparameters"])
    return made.download_vectors + made.client_vectors


METRICS: Mapping[str, Metric] = {
    "accuracy": Metric("test accuracy (%)", _percent("accuracy_final"), ".2f", seeds=True, better=1),
    "train": Metric("train", _percent("train_accuracy_mean"), ".2f", _percent("train_accuracy_std"), better=1),
    "validation": Metric(
        "validation", _percent("client_accuracy_mean"), ".2f", _percent("client_accuracy_std"), better=1
    ),
    "rounds": Metric("rounds", _until("rounds_to_target"), ".0f", timed=True),
    "relative_rounds": Metric("rounds", _until("rounds_to_target"), ".1f", relative=True, timed=True),
    "relative_traffic": Metric("traffic", _until("megabytes_to_target"), ".2f", relative=True, timed=True),
    "relative_compute": Metric("computing time", _until("seconds_to_target"), ".2f", relative=True, timed=True),
    "memory": Metric("stored memory", _stored_vectors, ".2f", ratio=True),
    "traffic": Metric("traffic", _plain("megabytes"), ".2f", ratio=True),
    "backprops": Metric("back-propagations", _plain("backprops"), ".2f", ratio=True),
    "seconds": Metric("seconds per round", _plain("seconds_per_round"), ".4f", relative=True),
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
        found = [part.get(seed) for part in by_seed]
        known = [v for v in found if v is not None]
        values.append(float(np.mean(known)) if len(known) == len(found) else None)
    return values


def cell(metric: Metric, groups: Groups, base: Groups, target: float | None) -> tuple[float | None, str]:
    """Return the number (mean over the seeds; None if a seed has none) and the text of a cell. base: FedAvg's runs."""
    values = value(metric, groups, target)
    known = [v for v in values if v is not None]
    if not known:
        return None, NONE
    mean = float(np.mean(known))
    if len(known) < len(values):
        return None, " / ".join(NONE if v is None else format(v, metric.form) for v in values)
    compared = [v for v in value(metric, base, target) if v is not None] if metric.relative or metric.ratio else []
    if metric.ratio:
        return mean, f"{mean / float(np.mean(compared)):.4g}x" if compared else NONE
    text = format(mean, metric.form)
    if metric.spread is not None:
        spreads = [v for v in value(metric, groups, target, metric.spread) if v is not None]
        text += f" ({format(float(np.mean(spreads)), metric.form)})" if spreads else ""
    if metric.seeds and len(values) > 1:
        text += f" ± {format(float(deviation(known)), metric.form)}"
    complete = compared and len(compared) == len(values)
    return mean, text + (f" ({mean / float(np.mean(compared)):.2f}x)" if metric.relative and complete else "")
