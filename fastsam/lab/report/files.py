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
    line,
    metrics_of,
    panel_name,
    panels,
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
    where = [(f"{run.label}, seed {run.seed}", os.path.relpath(run.run_dir, directory)) for run in runs]
    Document(context.title, context.facts, all_tables(runs), figures, where, context.command).write(directory)


def summary(runs: Sequence[FinishedRun], directory: Path) -> dict[str, Any]:
    """Return the content of a comparison's summary.json.

    It has the summary of each run, and per label the mean and the sample's standard deviation over seeds of its
    numbers. `swept` has the swept values of a run.
    """
    averaged: dict[str, Any] = {}
    for label, group in by_label(runs).items():
        first = {**group[0].summary.get("measures", {}), **group[0].summary.get("metrics", {}), **group[0].summary}
        numbers = [
            k for k, v in first.items() if isinstance(v, (int, float)) and not isinstance(v, bool) and k != "seed"
        ]
        complete = [
            k for k in numbers if k not in ("client_worst", "client_best") and len(values(group, k)) == len(group)
        ]
        averaged[label] = {"seeds": [run.seed for run in group]}
        averaged[label] |= {
            k: {"mean": float(np.mean(values(group, k))), "std": float(deviation(values(group, k)))} for k in complete
        }
    listed = [
        {
            "label": run.label,
            "swept": dict(run.point),
            "run_dir": os.path.relpath(run.run_dir, directory),
            **run.summary,
        }
        for run in runs
    ]
    return {"algorithms": averaged, "runs": listed}


def draw_plots(
    runs: Sequence[FinishedRun], counts: Mapping[str, np.ndarray], directory: Path, title: str
) -> list[Figure]:
    """Draw curves.png and classes.png, and metrics.png and measures.png if anything was measured.

    Each figure is saved in `directory` as PNG, SVG and PDF.

    Args:
        counts: numbers of samples `[clients, classes]`, by the swept values of the data; under "" if none was swept.
    """
    held = plots.classes(counts, directory / "classes.png", f"who holds which classes: {title}")
    return [*draw_curves(runs, directory, title), Figure(held, "Who holds which classes")]


def draw_curves(runs: Sequence[FinishedRun], directory: Path, title: str) -> list[Figure]:
    """Draw the figures of `draw_plots` that need only the records."""
    made = plots.curves(_histories(runs), directory / "curves.png", target_of(runs), title)
    return [Figure(made, "Test accuracy and error by round"), *_measures(runs, directory, title)]


def _histories(runs: Sequence[FinishedRun]) -> plots.Panels:
    """Return the histories by panel and line.

    There is a panel for each value of the keys that all runs took. A panel has a line for each algorithm and its
    variants.
    """
    shared, found = shared_keys(runs), dict[str, dict[str, list[Sequence[Mapping[str, Any]]]]]()
    for name, group in panels(runs).items():
        lines = found.setdefault(name, {})
        for run in group:
            lines.setdefault(line(run, shared), []).append(run.history)
    return found


def _measures(runs: Sequence[FinishedRun], directory: Path, title: str) -> list[Figure]:
    figures = []
    named = {"Metrics by round": ("metrics.png", metrics_of(runs)), "Measures by round": ("measures.png", NAMES)}
    for caption, (file, known) in named.items():
        keys = [key for key in known if any(record.get(key) is not None for run in runs for record in run.history)]
        if keys:
            figures.append(Figure(plots.measures(_histories(runs), keys, directory / file, title), caption))
    return figures


def _surfaces(grids: Mapping[str, np.ndarray], directory: Path) -> list[Figure]:
    if not grids:
        return []
    made = plots.surfaces(grids, RADIUS, directory / "surfaces.png")
    return [
        Figure(
            made,
            "Training loss around the final models of the first seed, in two random directions (filter-normalised)",
        )
    ]


def ablations(runs: Sequence[FinishedRun], directory: Path, title: str = "") -> list[Figure]:
    """Draw one figure per swept key, and one over rho/lr if either was swept.

    A figure has a panel for every value of the other keys that all runs took.
    """
    figures = []
    for key in dict.fromkeys(key for run in runs for key in run.point):
        found: dict[str, dict[str, list[plots.Point]]] = {}
        for name, label, group in _without(runs, (key,)):
            accuracies = values(group, "accuracy_final")
            if accuracies:
                point = plots.Point(group[0].point.get(key), accuracies)
                found.setdefault(name, {}).setdefault(label, []).append(point)
        if found:
            path = plots.ablations.ablation(found, key, directory / f"ablation-{key}.png", title)
            figures.append(Figure(path, f"Final test accuracy against {key}"))
    ratios: dict[str, dict[str, list[plots.ablations.Line]]] = {}
    for name, label, group in _without(runs, ("rho", "lr")):
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


def _without(runs: Sequence[FinishedRun], keys: Sequence[str]) -> Iterator[tuple[str, str, list[FinishedRun]]]:
    """Yield panel, line and runs of every label, for a figure that has `keys` on its axis."""
    shared = shared_keys(runs)
    for group in by_label(runs).values():
        panel = {key: value for key, value in group[0].point.items() if key in shared and key not in keys}
        yield panel_name(panel), line(group[0], (*keys, *shared)), group
