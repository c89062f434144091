"""Finished runs, grouped for reports."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fastsam.fed.algorithms import registry
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
_NAMES = {name: made.__name__.replace("_", "-") for name, made in registry.items()}


def spelled(label: str) -> str:
    """Return a label with the algorithms in it as the papers spell them, e.g. "FedSAM rho=0.05"."""
    return re.sub(r"[\w-]+", lambda word: _NAMES.get(word[0], word[0]), label)


def by_label(runs: Iterable[FinishedRun]) -> dict[str, list[FinishedRun]]:
    """Return the runs (one per seed) of each label, in order of appearance."""
    groups: dict[str, list[FinishedRun]] = {}
    for run in runs:
        groups.setdefault(run.label, []).append(run)
    return groups


def title_of(runs: Iterable[FinishedRun], data: str) -> str:
    """Return the names of the algorithms (their number, if there are more than five) and of the data."""
    names = list(dict.fromkeys(spelled(run.algorithm) for run in runs))
    return f"{', '.join(names) if len(names) <= 5 else f'{len(names)} algorithms'} on {data}"


def flat(run: FinishedRun) -> dict[str, Any]:
    """Return the summary of a run with its measures and metrics under their names."""
    return {**run.summary.get("measures", {}), **run.summary.get("metrics", {}), **run.summary}


def values(group: Group, key: str) -> list[float]:
    """Return the values of `key` in the runs that have it. Measures and metrics are found by their names."""
    return [value for run in group if (value := flat(run).get(key)) is not None]


def metrics_of(runs: Iterable[FinishedRun]) -> list[str]:
    """Return the metrics of the test set that the runs took, as keys of their records."""
    return list(dict.fromkeys(key for run in runs for key in run.summary.get("metrics", {}) if key.startswith("test_")))


def target_of(runs: Iterable[FinishedRun]) -> float | None:
    """Return the target accuracy of the first run that has one."""
    return next((run.summary["target"] for run in runs if run.summary.get("target") is not None), None)


def line(run: FinishedRun, axis_key: str) -> str:
    """Return the name of a run's line: its algorithm, and the values of its swept keys except the key of the axis."""
    texts = [f"{key}={value_text(value)}" for key, value in run.point.items() if key != axis_key]
    return " ".join([spelled(run.algorithm or run.label), *texts])


def baseline(groups: Mapping[str, Group], label: str) -> str | None:
    """Return the label that `label` is compared with, or None if no run can be compared.

    It is a label of FedAvg, or of the first algorithm if there is no FedAvg. It must have the same values of the keys
    that both took. If all labels are of one algorithm, all are compared with the first label.
    """
    algorithms = [group[0].algorithm for group in groups.values()]
    if len({*algorithms}) == 1:
        return next(iter(groups))
    base, label_point = "fedavg" if "fedavg" in algorithms else algorithms[0], groups[label][0].point
    for base_label, group in groups.items():
        point = group[0].point
        common_keys = label_point.keys() & point.keys()
        if group[0].algorithm == base and all(label_point[key] == point[key] for key in common_keys):
            return base_label
    return None
