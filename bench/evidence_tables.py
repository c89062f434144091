"""The tables of docs/about_accuracy.md from the record of `python -m bench evidence`: means, and differences of runs
with the same seed. Nothing here trains."""

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fastsam.lab.report.table import Table

BASELINES = {"methods": "SGD", "clients": "FedAvg"}
CURVES = {
    "rho": "Accuracy of SAM in percent by its radius, at one learning rate:",
    "start": "Accuracy of SAM in percent by the fraction of the steps before its first one:",
}
Record = Mapping[str, Any]


def difference(values: Sequence[float], baseline: Sequence[float]) -> tuple[float, float]:
    """Return the mean of `values[i] - baseline[i]`, runs with seed i, in percentage points, and its standard error.
    Raises ValueError for fewer than two pairs, and for unequal numbers."""
    pairs = [100 * a - 100 * b for a, b in zip(values, baseline, strict=True)]
    if len(pairs) < 2:
        raise ValueError(f"a standard error needs two seeds or more, got {len(pairs)}")
    return statistics.fmean(pairs), statistics.stdev(pairs) / math.sqrt(len(pairs))


def cell(mean: float, error: float) -> str:
    """Return a difference, bold beyond two standard errors."""
    text = f"{round(mean, 1) + 0.0:+.1f} ± {error:.1f}"  # + 0.0: no "-0.0"
    return f"**{text}**" if abs(mean) > 2 * error else text


def tables(cases: Sequence[Record]) -> Iterator[str]:
    """Yield a table in Markdown for each part of the evidence that was measured."""
    for part, baseline in BASELINES.items():
        if tasks := [case for case in cases if case["part"] == part]:
            yield f"Accuracy in percent, and the difference to {baseline}:\n\n{_differences(tasks, baseline)}"
    for part, words in CURVES.items():
        if tasks := [case for case in cases if case["part"] == part]:
            yield f"{words}\n\n{_curve(tasks)}"


def _differences(tasks: Sequence[Record], baseline: str) -> str:
    """Return a row for each method, the baseline first, and tasks across, by their models and wrong labels; a task may
    lack methods."""
    models = [task["title"].partition(",")[0] for task in tasks]
    tasks = sorted(tasks, key=lambda task: (models.index(task["title"].partition(",")[0]), task["noise"]))
    columns = [{row["name"]: row["steps"]["accuracy"] for row in task["rows"]} for task in tasks]
    names = dict.fromkeys([baseline, *(name for column in columns for name in column)])
    rows = [[f"`{name}`", *(_cell(column, name, baseline) for column in columns)] for name in names]
    return Table("", ["", *(task["title"] for task in tasks)], rows).markdown()


def _cell(column: Mapping[str, Sequence[float]], name: str, baseline: str) -> str:
    if name not in column:
        return "-"
    mean = f"{100 * statistics.fmean(column[name]):.1f}"
    return mean if name == baseline else f"{mean}, {cell(*difference(column[name], column[baseline]))}"


def _curve(tasks: Sequence[Record]) -> str:
    """Return a row for each task, and across the values."""
    values = [row["value"] for row in tasks[0]["rows"]]
    is_start = tasks[0]["part"] == "start"
    heads = [f"{100 * value:g} % ({2 - value:g} passes)" if is_start else f"{value:g}" for value in values]
    rows = [[task["title"], *(f"{100 * row['steps']['mean']:.1f}" for row in task["rows"])] for task in tasks]
    return Table("", ["", *heads], rows).markdown()
