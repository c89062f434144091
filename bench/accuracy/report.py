"""The tables of docs/variants_measured.md from the records of `python -m bench accuracy` and `evidence`.

They have means, spreads, and differences of runs with the same seed. Nothing here trains.
"""

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fastsam.lab.report.table import Table

PROTOCOLS = {"steps": "with the number of steps of SGD", "time": "in SGD's time"}
# Parts of the evidence: MNIST-1D and scanned digits, and clients.
BASELINES = {"1d": "SGD", "evidence": "SGD", "clients": "the same algorithm without SAM"}
WITHOUT_SAM = {"FedSAM": "FedAvg", "FedGAMMA": "SCAFFOLD", "FedSMOO": "FedDyn"}
Task = Mapping[str, Any]  # a case, with `who`: its rows by name
Record = Mapping[str, Any]


def difference(values: Sequence[float], baseline: Sequence[float]) -> tuple[float, float]:
    """Return the mean of `values[i] - others[i]`, runs with seed i, in percentage points, and its standard error.
    Raises ValueError for fewer than two pairs, and for unequal numbers."""
    pairs = [100 * a - 100 * b for a, b in zip(values, baseline, strict=True)]
    if len(pairs) < 2:
        raise ValueError(f"a standard error needs two seeds or more, got {len(pairs)}")
    return statistics.fmean(pairs), statistics.stdev(pairs) / math.sqrt(len(pairs))


def overall(tasks: Sequence[Task], variant: str, protocol: str) -> tuple[float, float]:
    """Return the difference to SGD and its error, over independent tasks, each counted the same."""
    accuracies = [[task["who"][name][protocol]["accuracy"] for name in (variant, "SGD")] for task in tasks]
    gains = [difference(values, baseline) for values, baseline in accuracies]
    return sum(mean for mean, _ in gains) / len(gains), math.sqrt(sum(e**2 for _, e in gains)) / len(gains)


def cell(mean: float, error: float) -> str:
    """Return a difference, bold beyond two standard errors."""
    text = f"{round(mean, 1) + 0.0:+.1f} ± {error:.1f}"  # + 0.0: no "-0.0"
    return f"**{text}**" if abs(mean) > 2 * error else text


def pieces(record: Mapping[str, Any], per_task: bool = True) -> Iterator[str]:
    """Yield the differences by either protocol in Markdown. Raises ValueError if a task lacks a contender.

    The first table has a column for each task if `per_task` is True.
    """
    tasks = [case | {"who": {row["name"]: row for row in case["rows"]}} for case in record["cases"]]
    for task in tasks:
        if missing_names := sorted({name for other_task in tasks for name in other_task["who"]} - task["who"].keys()):
            raise ValueError(
                f"task {task['name']!r} lacks {', '.join(missing_names)}: run the command again with --add"
            )
    for protocol, words in PROTOCOLS.items():
        table = differences(tasks, protocol, per_task and protocol == "steps")
        yield f"Difference to SGD in percentage points, trained {words}:\n\n{table}"


def differences(tasks: Sequence[Task], protocol: str, per_task: bool) -> str:
    """Return variants down, by their mean over everything; across the means by kind of labels, after each task."""
    groups = {words: [task for task in tasks if bool(task["noise"]) == noisy] for words, noisy in
              (("right labels", False), ("wrong labels", True))}  # fmt: skip
    columns = {task["title"]: [task] for task in tasks if per_task}
    columns |= {f"mean, {words}": group for words, group in groups.items() if group}
    optimizers = [variant for variant in tasks[0]["who"] if variant != "SGD"]
    ranking = sorted(optimizers, key=lambda variant: -overall(tasks, variant, protocol)[0])
    rows = [
        [f"`{variant}`", *(cell(*overall(column, variant, protocol)) for column in columns.values())]
        for variant in ranking
    ]
    return Table("", ["variant", *columns], rows).markdown()


def evidence_tables(cases: Sequence[Record]) -> Iterator[str]:
    """Yield a table in Markdown for each part of the evidence that was measured."""
    for part, baseline in BASELINES.items():
        if tasks := [case for case in cases if case["part"] == part]:
            yield f"Accuracy in percent, and the difference to {baseline}:\n\n{_evidence_table(tasks)}"
            if part == "1d" and (curves := [case for case in cases if case["part"] == "1d-rho"]):
                yield f"Accuracy of SAM in percent by its radius:\n\n{_curve_table(curves)}"


def _baseline(name: str) -> str | None:
    """Return the contender with which another one is compared; None for a baseline."""
    baselines = ("SGD", *WITHOUT_SAM.values())
    return None if name in baselines else WITHOUT_SAM.get(name, "SGD")


def _evidence_table(tasks: Sequence[Record]) -> str:
    """Return contenders down, each baseline before the contenders that are compared with it, and tasks across.

    Raises ValueError if a task lacks a contender of the first task, or a baseline.
    """
    columns = [{row["name"]: row["steps"]["accuracy"] for row in task["rows"]} for task in tasks]
    names = columns[0].keys() | {_baseline(name) or name for name in columns[0]}
    for task, column in zip(tasks, columns, strict=True):
        if missing_names := sorted(names - column.keys()):
            raise ValueError(
                f"task {task['name']!r} lacks {', '.join(missing_names)}: run the command again with --add"
            )
    order = [*reversed(columns[0])]  # the slowest were measured first
    groups = ([base, *(name for name in order if _baseline(name) == base)] for base in order if not _baseline(base))
    rows = [[f"`{name}`", *(_evidence_cell(column, name) for column in columns)] for group in groups for name in group]
    return Table("", ["", *(task["title"] for task in tasks)], rows).markdown()


def _curve_table(tasks: Sequence[Record]) -> str:
    """Return a row for each task, and across the radii."""
    rows = [[task["title"], *(f"{100 * row['steps']['mean']:.1f}" for row in task["rows"])] for task in tasks]
    return Table("", ["", *(row["title"] for row in tasks[0]["rows"])], rows).markdown()


def _evidence_cell(column: Mapping[str, Sequence[float]], name: str) -> str:
    mean, baseline = f"{100 * statistics.fmean(column[name]):.1f}", _baseline(name)
    return f"{mean}, {cell(*difference(column[name], column[baseline]))}" if baseline else mean
