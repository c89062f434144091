"""Ablations: accuracy against a key that was swept."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fastsam.lab.plots import figure as figures
from fastsam.lab.plots.curves import deviation, value_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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
    """The runs of a label at one position of the axis."""

    value: Any  # None for a label without a position, which is shown as a level
    accuracies: Sequence[float]  # accuracies of the seeds, in 0..1


Panels = Mapping[str, Mapping[str, Sequence[Point]]]  # title -> label -> points


@figures.style()
def ablation(panels: Panels, key: str, path: str | Path, title: str = "") -> Path:
    """Plot final test accuracy against `key`: mean over seeds with one standard deviation as a bar.

    Labels without the key are dashed levels. Numbers have an axis to scale, a logarithmic one when they are positive
    and span a factor of 8 or more. Other values are evenly spaced.
    """
    all_points = [point for lines in panels.values() for points in lines.values() for point in points]
    places = _places([point.value for point in all_points if point.value is not None])
    is_numeric = _are_numbers([*places])
    label = NAMES.get(key, key.replace("_", " "))
    figure, grid = _draw(panels, lambda value: places[value_text(value)], label, is_numeric)
    for axes in grid:
        if is_numeric:
            ticks = sorted(places.values())
            if ticks[0] > 0 and ticks[-1] >= 8 * ticks[0]:
                figures.logarithmic(axes, "x")
            if len(ticks) <= 8:
                axes.set_xticks(ticks, [f"{x:g}" for x in ticks])
        else:
            axes.set_xticks(list(places.values()), list(places))
            axes.margins(x=0.2)
    return figures.close(figure, path, title)


@figures.style()
def ratio(panels: Panels, path: str | Path, title: str = "") -> Path:
    """Plot final test accuracy against log10(rho/lr), the ratio that the FedLESAM paper tunes.

    The value of a point is rho/lr. Labels without a rho are dashed levels.
    """
    figure, _ = _draw(panels, math.log10, "log₁₀(ρ / local learning rate)", are_joined=True)
    return figures.close(figure, path, title)


def _draw(panels: Panels, place: Callable[[Any], float], axis_label: str, are_joined: bool) -> tuple[Figure, list[Any]]:
    """Return a figure with a panel for each title, and its axes. `place` is the position of a value on the axis.

    A label has the same style in all panels. Values without an order are not joined by a line.
    """
    styles = figures.styles(dict.fromkeys(label for lines in panels.values() for label in lines))
    rows, columns = figures.shape(len(panels))
    width = figures.COLUMN if columns == 1 else figures.PAGE
    figure = figures.new(width, 2.4 * rows + 0.3 + 0.06 * len(styles))
    grid = figures.panels(figure, len(panels), sharey=True)
    for axes, (name, lines) in zip(grid, panels.items(), strict=True):
        for label, points in lines.items():
            style = styles[label]
            for point in points:
                if point.value is None:
                    level = 100 * float(np.mean(point.accuracies))
                    axes.axhline(level, label=label, **{**style, "linestyle": "--"})
            coordinates = sorted((place(p.value), p.accuracies) for p in points if p.value is not None)
            _bars(axes, label, coordinates, style if are_joined else style | {"linestyle": "none"})
        axes.set(xlabel=axis_label, title=name)
        figures.finish(axes)
        if axes.get_subplotspec().is_first_col():
            axes.set_ylabel("final test accuracy (%)")
    figures.legend(figure, grid)
    return figure, grid


def _bars(axes: Any, label: str, points: Sequence[tuple[float, Sequence[float]]], style: Mapping[str, Any]) -> None:
    if not points:
        return
    means = np.array([100 * np.mean(accuracies) for _, accuracies in points])
    spreads = np.array([100 * deviation(accuracies) for _, accuracies in points])
    limits = np.minimum(spreads, [means, 100 - means])  # an accuracy is at least 0 % and at most 100 %
    bars = limits if spreads.any() else None
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
