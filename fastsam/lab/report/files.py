"""The files of a report: figures, summary.json, report.md and report.html."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fastsam.fed.common.atomic_files import write_json
from fastsam.fed.measures.surface import RADIUS
from fastsam.lab.plots import ablations, classes, curves, surfaces
from fastsam.lab.plots.ablations import Point
from fastsam.lab.plots.curves import deviation
from fastsam.lab.report.document import Document, Figure
from fastsam.lab.report.finished import (
    FinishedRun,
    by_label,
    flat,
    line,
    metrics_of,
    panel_name,
    shared_keys,
    spelled,
    target_of,
    values,
)
from fastsam.lab.report.tables import all_tables, sentences

# Files of a comparison's directory in addition to its figures and one sub-directory per run.
COMPARISON_FILES = {"report": "report.html", "report (text)": "report.md", "summary": "summary.json"}
BY_ROUND = ("curves", "metrics", "measures")  # figures that need only the records of runs
RUN_FIGURES = (*BY_ROUND, "classes")


def write_comparison(
    runs: Sequence[FinishedRun], directory: Path, title: str, facts: Mapping[str, Any], command: str,
    counts: Mapping[str, np.ndarray], grids: Mapping[str, np.ndarray],
) -> list[Figure]:  # fmt: skip
    """Write summary.json, the figures, report.md and report.html into the comparison's directory; return the figures.

    Args:
        runs: the runs.
        directory: directory of the comparison.
        title: title of the report.
        facts: lines below the title.
        command: command that repeats the comparison.
        counts: numbers of samples `[clients, classes]`, by the swept values of the data.
        grids: loss surfaces by label.
    """
    write_json(directory / "summary.json", summary(runs, directory))
    figures = draw_plots(runs, counts, directory, title)
    if grids:
        path = surfaces.surfaces(
            {spelled(label): grid for label, grid in grids.items()}, RADIUS, directory / "surfaces.png"
        )
        caption = "Training loss around the final models of the first seed, in two random directions"
        figures.append(Figure(path, f"{caption} (filter-normalised)"))
    figures += draw_ablations(runs, directory, title)
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


def draw_plots(
    runs: Sequence[FinishedRun], counts: Mapping[str, np.ndarray], directory: Path, title: str,
    kinds: Sequence[str] = RUN_FIGURES, prefix: str = "",
) -> list[Figure]:  # fmt: skip
    """Draw curves.png and classes.png, and metrics.png and measures.png if anything was measured.

    Each figure is saved in `directory` as PNG, SVG and PDF.

    Args:
        runs: the runs.
        counts: numbers of samples `[clients, classes]`, by the swept values of the data; under "" if none was
            swept.
        directory: directory of the figures.
        title: title of the figures.
        kinds: names of the figures to draw.
        prefix: text before the names of the files.
    """
    panel_keys, histories = shared_keys(runs), dict[str, dict[str, list[curves.History]]]()
    for run in runs:
        panel = histories.setdefault(panel_name({key: run.point[key] for key in panel_keys}), {})
        panel.setdefault(line(run, panel_keys), []).append(run.history)
    paths = {kind: directory / f"{prefix}{kind}.png" for kind in kinds}
    figures = []
    if "curves" in kinds:
        path = curves.curves(histories, paths["curves"], target_of(runs), title)
        figures.append(Figure(path, "Test accuracy and error by round"))
    for kind, names in (("metrics", metrics_of(runs)), ("measures", curves.NAMES)):
        keys = [key for key in names if any(record.get(key) is not None for run in runs for record in run.history)]
        if kind in kinds and keys:
            path = curves.measures(histories, keys, paths[kind], title)
            figures.append(Figure(path, f"{kind.capitalize()} by round"))
    if "classes" in kinds:
        path = classes.classes(counts, paths["classes"], f"who holds which classes: {title}")
        figures.append(Figure(path, "Who holds which classes"))
    return figures


def draw_ablations(runs: Sequence[FinishedRun], directory: Path, title: str = "", prefix: str = "") -> list[Figure]:
    """Draw one figure per swept key, and one over rho/lr if either was swept.

    A figure has a panel for every value of the other keys that all runs took.
    """
    figures = []
    for key in dict.fromkeys(key for run in runs for key in run.point):
        panels: dict[str, dict[str, list[Point]]] = {}
        for name, label, group in _figure_groups(runs, (key,)):
            accuracies = values(group, "accuracy_final")
            if accuracies:
                point = Point(group[0].point.get(key), accuracies)
                panels.setdefault(name, {}).setdefault(label, []).append(point)
        if panels:
            path = ablations.ablation(panels, key, directory / f"{prefix}ablation-{key}.png", title)
            figures.append(Figure(path, f"Final test accuracy against {key}"))
    ratios: dict[str, dict[str, list[Point]]] = {}
    for name, label, group in _figure_groups(runs, ("rho", "lr")):
        rho, accuracies = group[0].summary.get("hyperparameters", {}).get("rho"), values(group, "accuracy_final")
        # Lines without points keep the colours of the other figures; a method without a radius has a level.
        points = ratios.setdefault(name, {}).setdefault(label, [])
        if {"rho", "lr"} & group[0].point.keys() and isinstance(rho, float) and rho > 0 and group[0].lr and accuracies:
            points.append(Point(rho / group[0].lr, accuracies))
        elif rho is None and "lr" not in group[0].point and accuracies:
            points.append(Point(None, accuracies))
    if any(point.value is not None for lines in ratios.values() for points in lines.values() for point in points):
        path = ablations.ratio(ratios, directory / f"{prefix}ablation-rho-lr.png", title)
        figures.append(Figure(path, "Final test accuracy against log(rho/lr)"))
    return figures


def _figure_groups(runs: Sequence[FinishedRun], keys: Sequence[str]) -> Iterator[tuple[str, str, list[FinishedRun]]]:
    """Yield panel, line and runs of every label, for a figure that has `keys` on its axis."""
    panel_keys = shared_keys(runs)
    for group in by_label(runs).values():
        panel = {key: value for key, value in group[0].point.items() if key in panel_keys and key not in keys}
        yield panel_name(panel), line(group[0], (*keys, *panel_keys)), group
