"""Ablations: accuracy against a key that was swept."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fastsam.lab.plots import figure as figures
from fastsam.lab.plots.curves import deviation, value_text

# Labels of axes. Other keys are shown by their name.
NAMES = {
    "rho": "radius of the perturbation, ρ",
    "beta": "weight of the local gradient, β",
    "alpha": "α",
    "phi": "proximal coefficient, φ",
    "participation": "share of active clients",
    "local_epochs": "local epochs",
    "batch_size": "batch size",
    "clients": "number of clients",
    "lr": "local learning rate",
}


@dataclass(frozen=True)
class Point:
    """The runs of one value of the swept key."""

    value: Any  # None if the label does not take the key
    accuracies: Sequence[float]  # accuracies of the seeds, in 0..1


# position on the axis (None for a label without one, shown as a level), and accuracies of the seeds
Line = tuple[float | None, Sequence[float]]


@figures.apply_style
def ablation(panels: Mapping[str, Mapping[str, Sequence[Point]]], key: str, path: str | Path, title: str = "") -> Path:
    """Plot final test accuracy against `key`: mean over seeds with one standard deviation as a bar.

    Labels without the key are dashed levels. Numbers have an axis to scale, a logarithmic one when they are positive
    and span a factor of 8 or more. Other values are evenly spaced. panels: title -> label -> points.
    """
    all_points = [point for lines in panels.values() for points in lines.values() for point in points]
    places = _places([point.value for point in all_points if point.value is not None])
    is_numeric = _are_numbers([*places])
    figure, grid, styles = _grid(panels)
    for axes, lines in zip(grid, panels.values(), strict=True):
        for label, points in lines.items():
            style = styles[label]
            _levels(axes, label, [point.accuracies for point in points if point.value is None], style)
            coordinates = sorted((places[value_text(p.value)], p.accuracies) for p in points if p.value is not None)
            # Values without an order are not joined by a line.
            _bars(axes, label, coordinates, style if is_numeric else style | {"linestyle": "none"})
        axes.set(xlabel=NAMES.get(key, key.replace("_", " ")), ylabel="final test accuracy (%)")
        if is_numeric:
            ticks = sorted(places.values())
            if ticks[0] > 0 and ticks[-1] >= 8 * ticks[0]:
                figures.logarithmic(axes, "x")
            if len(ticks) <= 8:
                axes.set_xticks(ticks, [f"{x:g}" for x in ticks])
        else:
            axes.set_xticks(list(places.values()), list(places))
            axes.margins(x=0.2)
    return _close(figure, grid, panels, path, title)


@figures.apply_style
def ratio(panels: Mapping[str, Mapping[str, Sequence[Line]]], path: str | Path, title: str = "") -> Path:
    """Plot final test accuracy against log10(rho/lr), the ratio that the FedLESAM paper tunes.

    Labels without a rho are dashed levels. panels: title -> label -> (ratio, accuracies).
    """
    figure, grid, styles = _grid(panels)
    for axes, lines in zip(grid, panels.values(), strict=True):
        for label, points in lines.items():
            _levels(axes, label, [accuracies for place, accuracies in points if place is None], styles[label])
            coordinates = sorted((math.log10(place), accuracies) for place, accuracies in points if place is not None)
            _bars(axes, label, coordinates, styles[label])
        axes.set(xlabel="log₁₀(ρ / local learning rate)", ylabel="final test accuracy (%)")
    return _close(figure, grid, panels, path, title)


def _grid(panels: Mapping[str, Mapping[str, Any]]) -> tuple[Any, list[Any], dict[str, dict[str, Any]]]:
    """Return a figure with a panel for each title, its panels, and the style of each label in all of them."""
    styles = figures.styles(dict.fromkeys(label for lines in panels.values() for label in lines))
    rows, columns = figures.shape(len(panels))
    width = figures.COLUMN if columns == 1 else figures.PAGE
    figure = figures.new(width, 2.4 * rows + 0.3 + 0.06 * len(styles))
    return figure, figures.panels(figure, len(panels), sharey=True), styles


def _levels(axes: Any, label: str, levels: Sequence[Sequence[float]], style: Mapping[str, Any]) -> None:
    for accuracies in levels:
        axes.axhline(100 * float(np.mean(accuracies)), label=label, **{**style, "linestyle": "--"})


def _bars(axes: Any, label: str, points: Sequence[tuple[float, Sequence[float]]], style: Mapping[str, Any]) -> None:
    if not points:
        return
    means = [100 * float(np.mean(a)) for _, a in points]
    spreads = [100 * float(deviation(a)) for _, a in points]
    # An accuracy is at least 0 % and at most 100 %.
    limits = [[min(s, m) for s, m in zip(spreads, means, strict=True)]]
    limits += [[min(s, 100 - m) for s, m in zip(spreads, means, strict=True)]]
    bars = limits if any(spreads) else None
    axes.errorbar([x for x, _ in points], means, bars, label=label, marker="o", markersize=3, capsize=2, **style)


def _places(values: Sequence[Any]) -> dict[str, float]:
    """Return the position of each value on the axis, by its name: numbers are at their values, others at 0, 1, ..."""
    names = list(dict.fromkeys(map(value_text, values)))
    return {name: float(name if _are_numbers(names) else i) for i, name in enumerate(names)}


def _are_numbers(names: Sequence[str]) -> bool:
    try:
        return all(math.isfinite(float(name)) for name in names)
    except ValueError:
        return False


def _close(figure: Any, grid: Sequence[Any], panels: Iterable[str], path: str | Path, title: str) -> Path:
    for axes, name in zip(grid, panels, strict=True):
        figures.finish(axes)
        axes.set_title(name)
        if not axes.get_subplotspec().is_first_col():
            axes.set_ylabel("")
    figures.legend(figure, grid)
    return figures.close(figure, path, title)
