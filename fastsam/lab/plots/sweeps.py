"""The curve of a sweep: final accuracy against the swept key."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
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
    """The runs of a label at one position of the axis."""

    value: Any  # None for a label without a position, which is shown as a level
    accuracies: Sequence[float]  # accuracies of the seeds, in 0..1


@figures.style()
def sweep_curve(lines: Mapping[str, Sequence[Point]], key: str, path: str | Path, title: str = "") -> Path:
    """Plot final test accuracy against `key`: mean over seeds with one standard deviation as a bar.

    Labels without the key are dashed levels. Numbers have an axis to scale, a logarithmic one when they are positive
    and span a factor of 8 or more. Other values are evenly spaced, and no line joins them.
    """
    names = dict.fromkeys(value_text(p.value) for points in lines.values() for p in points if p.value is not None)
    is_numeric = _are_numbers(names)
    places = {name: float(name if is_numeric else i) for i, name in enumerate(names)}
    figure = figures.new(figures.COLUMN, 2.7 + 0.06 * len(lines))
    axes, styles = figure.subplots(), figures.styles(lines)
    for label, points in lines.items():
        style = styles[label]
        for point in points:
            if point.value is None:
                level = 100 * float(np.mean(point.accuracies))
                axes.axhline(level, label=label, **{**style, "linestyle": "--"})
        coordinates = sorted((places[value_text(p.value)], p.accuracies) for p in points if p.value is not None)
        _bars(axes, label, coordinates, style if is_numeric else style | {"linestyle": "none"})
    axes.set(xlabel=NAMES.get(key, key.replace("_", " ")), ylabel="final test accuracy (%)")
    figures.finish(axes)
    if is_numeric:
        ticks = sorted(places.values())
        if ticks[0] > 0 and ticks[-1] >= 8 * ticks[0]:
            figures.logarithmic(axes, "x")
        if len(ticks) <= 8:
            axes.set_xticks(ticks, [f"{x:g}" for x in ticks])
    else:
        axes.set_xticks(list(places.values()), list(places))
        axes.margins(x=0.2)
    figures.legend(figure, [axes])
    return figures.close(figure, path, title)


def _bars(axes: Any, label: str, points: Sequence[tuple[float, Sequence[float]]], style: Mapping[str, Any]) -> None:
    if not points:
        return
    means = np.array([100 * np.mean(accuracies) for _, accuracies in points])
    spreads = np.array([100 * deviation(accuracies) for _, accuracies in points])
    limits = np.minimum(spreads, [means, 100 - means])  # an accuracy is at least 0 % and at most 100 %
    bars = limits if spreads.any() else None
    axes.errorbar([x for x, _ in points], means, bars, label=label, marker="o", markersize=3, capsize=2, **style)


def _are_numbers(names: Mapping[str, None]) -> bool:
    try:
        return all(math.isfinite(float(name)) for name in names)
    except ValueError:
        return False
