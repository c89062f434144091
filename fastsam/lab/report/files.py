"""The files of a report: figures, summary.json, report.md and report.html."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from fastsam.fed.common.atomic_files import write_json
from fastsam.fed.measures.surface import RADIUS
from fastsam.lab import plots
from fastsam.lab.plots.curves import NAMES, deviation
from fastsam.lab.report.document import Document, Figure
from fastsam.lab.report.finished import (
    FinishedRun,
    by_label,
    flat,
    line,
    metrics_of,
    panel_name,
    shared_keys,
    target_of,
    values,
)
from fastsam.lab.report.tables import all_tables

# Files of a comparison's directory in addition to one sub-directory per run. There may be more figures.
COMPARISON_FILES = {
    "report": "report.html", "report (text)": "report.md", "summary": "summary.json", "curves": "curves.png",
    "classes": "classes.png",
}  # fmt: skip


@dataclass(frozen=True)
class Context:
    """Content of a comparison's report in addition to its runs."""

    title: str
    facts: Mapping[str, Any]  # lines below the title
    command: str  # command that repeats the comparison
    counts: Mapping[str, np.ndarray]  # numbers of samples `[clients, classes]`, by the swept values of the data
    surfaces: Mapping[str, np.ndarray] = field(default_factory=dict)  # loss surfaces by label


def write_comparison(runs: Sequence[FinishedRun], context: Context, directory: Path) -> None:
    """Write summary.json, the figures, report.md and report.html into the comparison's directory."""
    write_json(directory / "summary.json", summary(runs, directory))
    figures = [
        *draw_plots(runs, context.counts, directory, context.title),
        *_surfaces(context.surfaces, directory),
        *ablations(runs, directory, context.title),
    ]
    run_paths = [(f"{run.label}, seed {run.seed}", os.path.relpath(run.run_dir, directory)) for run in runs]
    Document(context.title, context.facts, all_tables(runs), figures, run_paths, context.command).write(directory)


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
    runs: Sequence[FinishedRun], counts: Mapping[str, np.ndarray], directory: Path, title: str
) -> list[Figure]:
    """Draw curves.png and classes.png, and metrics.png and measures.png if anything was measured.

    Each figure is saved in `directory` as PNG, SVG and PDF.

    Args:
        counts: numbers of samples `[clients, classes]`, by the swept values of the data; under "" if none was swept.
    """
    path = plots.classes(counts, directory / "classes.png", f"who holds which classes: {title}")
    return [*draw_curves(runs, directory, title), Figure(path, "Who holds which classes")]


def draw_curves(runs: Sequence[FinishedRun], directory: Path, title: str) -> list[Figure]:
    """Draw the figures of `draw_plots` that need only the records."""
    path = plots.curves(_histories(runs), directory / "curves.png", target_of(runs), title)
    return [Figure(path, "Test accuracy and error by round"), *_measures(runs, directory, title)]


def _histories(runs: Sequence[FinishedRun]) -> plots.Panels:
    """Return the histories by panel (a value of each key that all runs took) and line (an algorithm, or a variant)."""
    panel_keys, panels = shared_keys(runs), dict[str, dict[str, list[Sequence[Mapping[str, Any]]]]]()
    for run in runs:
        name = panel_name({key: run.point[key] for key in panel_keys})
        panels.setdefault(name, {}).setdefault(line(run, panel_keys), []).append(run.history)
    return panels


def _measures(runs: Sequence[FinishedRun], directory: Path, title: str) -> list[Figure]:
    figures = []
    figure_specs = {"Metrics by round": ("metrics.png", metrics_of(runs)), "Measures by round": ("measures.png", NAMES)}
    for caption, (file, file_keys) in figure_specs.items():
        keys = [key for key in file_keys if any(record.get(key) is not None for run in runs for record in run.history)]
        if keys:
            figures.append(Figure(plots.measures(_histories(runs), keys, directory / file, title), caption))
    return figures


def _surfaces(grids: Mapping[str, np.ndarray], directory: Path) -> list[Figure]:
    if not grids:
        return []
    caption = "Training loss around the final models of the first seed, in two random directions (filter-normalised)"
    return [Figure(plots.surfaces(grids, RADIUS, directory / "surfaces.png"), caption)]


def ablations(runs: Sequence[FinishedRun], directory: Path, title: str = "") -> list[Figure]:
    """Draw one figure per swept key, and one over rho/lr if either was swept.

    A figure has a panel for every value of the other keys that all runs took.
    """
    figures = []
    for key in dict.fromkeys(key for run in runs for key in run.point):
        panels: dict[str, dict[str, list[plots.Point]]] = {}
        for name, label, group in _figure_groups(runs, (key,)):
            accuracies = values(group, "accuracy_final")
            if accuracies:
                point = plots.Point(group[0].point.get(key), accuracies)
                panels.setdefault(name, {}).setdefault(label, []).append(point)
        if panels:
            path = plots.ablations.ablation(panels, key, directory / f"ablation-{key}.png", title)
            figures.append(Figure(path, f"Final test accuracy against {key}"))
    ratios: dict[str, dict[str, list[plots.ablations.Line]]] = {}
    for name, label, group in _figure_groups(runs, ("rho", "lr")):
        rho, accuracies = group[0].summary.get("hyperparameters", {}).get("rho"), values(group, "accuracy_final")
        # Lines without points keep the colours of the other figures; a method without a radius has a level.
        points = ratios.setdefault(name, {}).setdefault(label, [])
        if {"rho", "lr"} & group[0].point.keys() and isinstance(rho, float) and rho > 0 and group[0].lr and accuracies:
            points.append((rho / group[0].lr, accuracies))
        elif rho is None and "lr" not in group[0].point and accuracies:
            points.append((None, accuracies))
    if any(place is not None for lines in ratios.values() for points in lines.values() for place, _ in points):
        path = plots.ablations.ratio(ratios, directory / "ablation-rho-lr.png", title)
        figures.append(Figure(path, "Final test accuracy against log(rho/lr)"))
    return figures


def _figure_groups(runs: Sequence[FinishedRun], keys: Sequence[str]) -> Iterator[tuple[str, str, list[FinishedRun]]]:
    """Yield panel, line and runs of every label, for a figure that has `keys` on its axis."""
    panel_keys = shared_keys(runs)
    for group in by_label(runs).values():
        panel = {key: value for key, value in group[0].point.items() if key in panel_keys and key not in keys}
        yield panel_name(panel), line(group[0], (*keys, *panel_keys)), group
