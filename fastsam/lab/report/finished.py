"""Finished runs, grouped for reports."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fastsam.lab.plots.curves import value_text


@dataclass(frozen=True)
class FinishedRun:
    """A finished run."""

    label: str  # name of its line in the report: the algorithm, and the values of a sweep
    seed: int
    summary: Mapping[str, Any]  # content of its summary.json
    history: Sequence[Mapping[str, Any]]  # its records
    run_dir: Path
    algorithm: str = ""  # short name of the algorithm
    point: Mapping[str, Any] = field(default_factory=dict)  # swept keys that it took, with their values
    lr: float | None = None  # local learning rate; None if it is not a number


Group = Sequence[FinishedRun]


def by_label(runs: Iterable[FinishedRun]) -> dict[str, list[FinishedRun]]:
    """Return the runs (one per seed) of each label, in order of appearance."""
    groups: dict[str, list[FinishedRun]] = {}
    for run in runs:
        groups.setdefault(run.label, []).append(run)
    return groups


def title(runs: Iterable[FinishedRun], data: str) -> str:
    """Return the names of the algorithms (their number, if there are more than five) and of the data."""
    names = list(dict.fromkeys(run.algorithm for run in runs))
    return f"{', '.join(names) if len(names) <= 5 else f'{len(names)} algorithms'} on {data}"


def values(group: Group, key: str) -> list[float]:
    """Return the values of `key` in the runs that have it. Measures and metrics are found by their names."""
    found = [
        {**run.summary.get("measures", {}), **run.summary.get("metrics", {}), **run.summary}.get(key) for run in group
    ]
    return [value for value in found if value is not None]


def metrics_of(runs: Iterable[FinishedRun]) -> list[str]:
    """Return the metrics of the test set that the runs took, as keys of their records."""
    return list(dict.fromkeys(key for run in runs for key in run.summary.get("metrics", {}) if key.startswith("test_")))


def target_of(runs: Iterable[FinishedRun]) -> float | None:
    """Return the target accuracy of the first run that has one."""
    return next((run.summary["target"] for run in runs if run.summary.get("target") is not None), None)


def shared_keys(runs: Iterable[FinishedRun]) -> tuple[str, ...]:
    """Return the swept keys that every run took.

    Their values are settings in which algorithms are compared, not variants of an algorithm.
    """
    points = [run.point for run in runs]
    return tuple(key for key in (points[0] if points else ()) if all(key in point for point in points))


def panels(runs: Sequence[FinishedRun]) -> dict[str, list[FinishedRun]]:
    """Return the runs by the values of the keys that all of them took, e.g. "alpha = 0.1".

    The only name is "" if there are no such keys.
    """
    found: dict[str, list[FinishedRun]] = {}
    shared = shared_keys(runs)
    for run in runs:
        found.setdefault(panel_name({key: run.point[key] for key in shared}), []).append(run)
    return found


def panel_name(point: Mapping[str, Any]) -> str:
    """Return the title of a panel, e.g. "alpha = 0.1"."""
    return ", ".join(f"{key} = {value_text(value)}" for key, value in point.items())


def line(run: FinishedRun, without: Iterable[str]) -> str:
    """Return the name of a run's line: its algorithm, and the values of its swept keys.

    The keys `without` are left out, because a panel or an axis shows them.
    """
    left = {key: value for key, value in run.point.items() if key not in {*without}}
    return " ".join([run.algorithm or run.label, *(f"{key}={value_text(value)}" for key, value in left.items())])


def baseline(groups: Mapping[str, Group], label: str) -> str | None:
    """Return the label that `label` is compared with, or None if no run can be compared.

    It is a label of FedAvg, or of the first algorithm if there is no FedAvg. It must have the same values of the keys
    that both took. If all labels are of one algorithm, all are compared with the first label.
    """
    algorithms = [group[0].algorithm for group in groups.values()]
    if len({*algorithms}) == 1:
        return next(iter(groups))
    base, own = "fedavg" if "fedavg" in algorithms else algorithms[0], groups[label][0].point
    for other, group in groups.items():
        point = group[0].point
        if group[0].algorithm == base and all(own[key] == point[key] for key in own.keys() & point.keys()):
            return other
    return None
