"""The files of a report: figures, summary.json, report.html and the tables as .csv and .tex."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fastsam.fed.common.atomic_files import write_json
from fastsam.fed.measures.surface import RADIUS
from fastsam.lab.plots import curves, surfaces, sweeps
from fastsam.lab.plots.curves import deviation
from fastsam.lab.plots.sweeps import Point
from fastsam.lab.report.document import Document, Figure
from fastsam.lab.report.finished import (
    FinishedRun,
    by_label,
    flat,
    line,
    metrics_of,
    spelled,
    target_of,
    values,
)
from fastsam.lab.report.tables import all_tables, sentences

# Files of a comparison's directory in addition to its figures and one sub-directory per run.
COMPARISON_FILES = {"report": "report.html", "tables": "tables", "summary": "summary.json"}


def write_comparison(
    runs: Sequence[FinishedRun], directory: Path, title: str, facts: Mapping[str, Any], command: str,
    grids: Mapping[str, np.ndarray],
) -> list[Figure]:  # fmt: skip
    """Write summary.json, the figures, the report and its tables into the comparison's directory; return the figures.

    Args:
        runs: the runs.
        directory: directory of the comparison.
        title: title of the report.
        facts: lines below the title.
        command: command that repeats the comparison.
        grids: loss surfaces by label.
    """
    write_json(directory / "summary.json", summary(runs, directory))
    figures = draw_curves(runs, directory, title)
    if grids:
        path = surfaces.surfaces(
            {spelled(label): grid for label, grid in grids.items()}, RADIUS, directory / "surfaces.png"
        )
        caption = "Training loss around the final models of the first seed, in two random directions"
        figures.append(Figure(path, f"{caption} (filter-normalised)"))
    figures += draw_sweeps(runs, directory, title)
    run_paths = [(f"{spelled(run.label)}, seed {run.seed}", os.path.relpath(run.run_dir, directory)) for run in runs]
    Document(title, facts, all_tables(runs), figures, run_paths, command, sentences(runs)).write(directory)
    return figures


def summary(runs: Sequence[FinishedRun], directory: Path) -> dict[str, Any]:
    """Return the content of a comparison's summary.json.

    It has the summary of each run, and per label the mean and the sample's standard deviation over seeds of its
    numbers. `swept` has the swept values of a run.
    """
    means: dict[str, Any] = {}
    for label, group in by_label(runs).items():
        means[label] = {"seeds": [run.seed for run in group]}
        for key, value in flat(group[0]).items():
            numbers = values(group, key)
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if number and len(numbers) == len(group) and key not in ("seed", "client_worst", "client_best"):
                means[label][key] = {"mean": float(np.mean(numbers)), "std": float(deviation(numbers))}
    run_records = []
    for run in runs:
        head = {"label": run.label, "swept": dict(run.point), "run_dir": os.path.relpath(run.run_dir, directory)}
        run_records.append({**head, **run.summary})
    return {"algorithms": means, "runs": run_records}


def draw_curves(runs: Sequence[FinishedRun], directory: Path, title: str, prefix: str = "") -> list[Figure]:
    """Draw curves.png: test accuracy by round, or the training loss of runs without an accuracy. Draw curve-KEY.png
    of each measure and metric that the runs recorded.

    Each figure is saved as PNG, SVG and PDF.

    Args:
        runs: the runs.
        directory: directory of the figures.
        title: title of the figures.
        prefix: text before the names of the files.
    """
    lines: dict[str, list[curves.History]] = {}
    for run in runs:
        lines.setdefault(spelled(run.label), []).append(run.history)
    recorded = {key for run in runs for record in run.history for key, value in record.items() if value is not None}
    path, key = directory / f"{prefix}curves.png", curves.ACCURACY
    if key in recorded:
        figures = [Figure(curves.curve(lines, path, title, key, target_of(runs)), "Test accuracy by round")]
    else:
        figures = [Figure(curves.curve(lines, path, title, curves.LOSS), "Training loss by round")]
    for key in (*metrics_of(runs), *curves.NAMES):
        if key in recorded:
            path, name = directory / f"{prefix}curve-{key.replace('_', '-')}.png", curves.name_of(key)
            figures.append(Figure(curves.curve(lines, path, title, key), f"{name[0].upper()}{name[1:]} by round"))
    return figures


def draw_sweeps(runs: Sequence[FinishedRun], directory: Path, title: str = "", prefix: str = "") -> list[Figure]:
    """Draw sweep-KEY.png for each swept key, with a line for each algorithm and choice of the other swept keys."""
    figures = []
    for key in dict.fromkeys(key for run in runs for key in run.point):
        lines: dict[str, list[Point]] = {}
        for group in by_label(runs).values():
            if accuracies := values(group, "accuracy_final"):
                lines.setdefault(line(group[0], key), []).append(Point(group[0].point.get(key), accuracies))
        if lines:
            path = sweeps.sweep_curve(lines, key, directory / f"{prefix}sweep-{key}.png", title)
            figures.append(Figure(path, f"Final test accuracy against {key}"))
    return figures
