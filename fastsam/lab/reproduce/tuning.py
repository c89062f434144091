"""Tuning of a learning rate and a radius for each method of a table, over one printed grid and on held-out samples.

Every method runs every point of the grid that it takes, before the runs of the table. The seed is not used by the
table. A fifth of each client's training samples is held out, and accuracy is measured on this fifth. The test set is
not used. The point with the best mean over all values that the part sweeps is used for all of them. Ties go to the
earlier value.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch

from fastsam.fed.common import seeds
from fastsam.fed.data import FederatedData
from fastsam.lab import compare
from fastsam.lab.compare import Plan
from fastsam.lab.config import ConfigError, ConfigSource, parse_flags
from fastsam.lab.report import FinishedRun
from fastsam.lab.report.table import Table as TextTable
from fastsam.lab.reproduce.table import Part
from fastsam.lab.run_config import short_name
from fastsam.lab.sweep import Axis, parse_axis

if TYPE_CHECKING:
    from rich.console import Console

GRID = ("lr=0.05,0.1,0.2,0.4,0.8", "rho=0.02,0.05,0.1,0.2")
SEED = 1000  # smallest seed of tuning runs; the seeds of tables are small
HELD_OUT = 0.2  # share of each client's training samples
FOLDER = "tuning"

Point = tuple[tuple[str, str], ...]  # a method's values, as they are written in the grid
Accuracies = Mapping[str, Mapping[Point, float]]  # held-out accuracies of a part, by algorithm and point


@dataclass(frozen=True)
class Grid:
    """The grid of `--tune`."""

    axes: tuple[Axis, ...]  # keys and their values
    seed: int = SEED  # seed of the runs

    @property
    def texts(self) -> list[str]:
        return [axis.text for axis in self.axes]


def best(accuracies: Accuracies, algorithm: str) -> Point:
    """Return the best point; empty if no run was finished, or the algorithm takes no key of the grid."""
    points = accuracies.get(algorithm, {})
    return max(points, key=lambda point: points[point], default=())


def grid(texts: Sequence[str], numbers: Sequence[int], flags: Sequence[str]) -> Grid:
    """Return the grid of `--tune`.

    Raises ConfigError if a text is not a grid of numbers, or a key is both tuned and given by a flag.

    Args:
        texts: texts such as "lr=0.1,0.2"; "" for the grid of this module.
    """
    axes = tuple(parse_axis(text) for text in ([text for text in texts if text] or GRID))
    if any(axis.table is not None for axis in axes):
        raise ConfigError(
            f"--tune takes keys of all methods, such as lr=0.1,0.2, got {', '.join(axis.text for axis in axes)}; "
            "leave out the name of the method, because tuning only one method would favour it"
        )
    for axis in axes:
        try:
            list(map(float, axis.values))
        except ValueError:
            raise ConfigError(f"--tune takes numbers such as lr=0.1,0.2, got {axis.text!r}") from None
    flat, tables = parse_flags(flags)
    flag_keys = {*flat, *(key for table in tables.values() for key in table)}
    for axis in axes:
        if axis.key in flag_keys:
            raise ConfigError(
                f"{axis.key} is tuned, and a flag gives it: leave out --{axis.key}, or {axis.key} of --tune"
            )
    return Grid(axes, SEED if SEED not in numbers else max(numbers) + 1)


def tune(
    sources: Mapping[Part, ConfigSource], grid: Grid, directory: Path, resume: bool, console: Console
) -> tuple[dict[Part, ConfigSource], dict[Part, Accuracies]]:
    """Return the parts' sources with the best point of each method, and all results.

    Finished runs of `directory` are not run again.
    """
    sources_by_part, results = dict[Part, ConfigSource](), dict[Part, Accuracies]()
    for number, (part, source) in enumerate(sources.items(), 1):
        axes = [axis for axis in grid.axes if not any(parse_axis(text).key == axis.key for text in part.sweep)]
        results[part] = {}
        if axes and any(axis.applies_to(name) for axis in axes for name in part.algorithms):
            trial = _trial(part, source, grid, axes)
            console.print(f"tuning [{number}/{len(sources)}] {part.title}: {len(trial.runs)} runs", soft_wrap=True)
            results[part] = _run(trial, {axis.key for axis in axes}, directory / FOLDER / part.slug, resume)
        tables = {short_name(name): dict(best(results[part], short_name(name))) for name in part.algorithms}
        tables_by_name = {name: {**source.flag_tables.get(name, {}), **point} for name, point in tables.items()}
        flag_tables = {name: table for name, table in tables_by_name.items() if table}
        sources_by_part[part] = replace(source, flag_tables=flag_tables)
    return sources_by_part, results


def _trial(part: Part, source: ConfigSource, grid: Grid, axes: Sequence[Axis]) -> Plan:
    axis_texts = [axis.text for axis in axes if any(axis.applies_to(name) for name in part.algorithms)]
    return compare.plan(source, part.algorithms, [str(grid.seed)], [*part.sweep, *axis_texts])


def _run(trial: Plan, keys: set[str], directory: Path, resume: bool) -> Accuracies:
    from rich.console import Console

    data = {key: held_out(data_set) for key, data_set in compare.load_all(trial).items()}
    compare.write_record(trial, directory)
    runs, _ = compare.train_all(trial, data, directory, resume, Console(quiet=True), "")
    return _accuracies(runs, keys)


def _accuracies(runs: Sequence[FinishedRun], keys: set[str]) -> dict[str, dict[Point, float]]:
    """Return the mean accuracy of each point, over the last ten evaluated rounds and over other swept keys.

    A point is left out if one of its runs is missing.
    """
    accuracies: dict[str, dict[Point, list[float]]] = {}
    for run in runs:
        point = tuple((key, f"{value:g}") for key, value in run.point.items() if key in keys)
        accuracy = run.summary["accuracy_last10"]
        if point and accuracy is not None:
            accuracies.setdefault(run.algorithm, {}).setdefault(point, []).append(accuracy)
    run_counts = {name: max(map(len, points.values())) for name, points in accuracies.items()}
    return {
        name: {point: fmean(values) for point, values in points.items() if len(values) == run_counts[name]}
        for name, points in accuracies.items()
    }


def held_out(data: FederatedData) -> FederatedData:
    """Return the data with a fifth of each client's samples moved to the test set, which has only these samples.

    A client of fewer than five samples keeps all of them. Raises ValueError if no client has five samples.
    """
    train_parts, test_parts = [], []
    for client, (x, y) in enumerate(data.clients):
        order = torch.randperm(len(y), generator=torch.Generator().manual_seed(seeds.derive(SEED, "held out", client)))
        count = int(HELD_OUT * len(y))
        train_parts.append((x[order[count:]], y[order[count:]]))
        test_parts.append((x[order[:count]], y[order[:count]]))
    test = tuple(torch.cat(parts) for parts in zip(*test_parts, strict=True))
    if not len(test[1]):
        raise ValueError(f"{data.name}: no client has five samples, of which one could be held out for --tune")
    return replace(data, clients=train_parts, test=(test[0], test[1]))


# --- what the report says ---


def text_tables(results: Mapping[Part, Accuracies], grid: Grid, name: Callable[[str], str]) -> list[TextTable]:
    """Return one table of the chosen values for each part.

    Args:
        name: function that returns a method's name for the report.
    """
    tables = []
    for part, accuracies in results.items():
        rows = [[name(algorithm), *_row(accuracies, short_name(algorithm), grid)] for algorithm in part.algorithms]
        keys = [axis.key for axis in grid.axes]
        head = ["algorithm", *keys, "held-out accuracy", "worst of its grid", "at the edge"]
        note = (
            f"Grid: {'; '.join(grid.texts)}, the same for every method. Seed {grid.seed}, which the table does not "
            f"use; on {100 * (1 - HELD_OUT):g} % of each client's training samples, judged on the other "
            f"{100 * HELD_OUT:g} %, by the mean of the last ten evaluated rounds. The test set was not looked at. At "
            "the edge: the best value is the grid's first or last, and a better one may lie beyond it. All points: "
            "summary.json."
        )
        tables.append(TextTable(f"Tuned: {part.title}", head, rows, note))
    return tables


def _row(accuracies: Accuracies, algorithm: str, grid: Grid) -> list[str]:
    point, points = dict(best(accuracies, algorithm)), accuracies.get(algorithm, {})
    values = [point.get(axis.key, "–") for axis in grid.axes]
    if not points:
        return [*values, "–", "–", "–"]
    ends = {axis.key: {f"{float(axis.values[i]):g}" for i in (0, -1)} for axis in grid.axes}
    edge = [key for key, value in point.items() if value in ends[key]]
    return [*values, f"{100 * max(points.values()):.2f}", f"{100 * min(points.values()):.2f}", ", ".join(edge) or "–"]


def record(results: Mapping[Part, Accuracies], grid: Grid) -> dict[str, Any]:
    """Return the grid and every point of every method, for summary.json."""
    parts = [
        {"part": part.title, "algorithm": algorithm, "point": dict(point), "accuracy": accuracy,
            "taken": point == best(accuracies, algorithm)}
        for part, accuracies in results.items()
        for algorithm, points in accuracies.items()
        for point, accuracy in points.items()
    ]  # fmt: skip
    return {"grid": grid.texts, "seed": grid.seed, "held_out": HELD_OUT, "points": parts}
