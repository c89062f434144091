"""Heat maps of the classes of each client."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from fastsam.lab.plots import figure as figures


@figures.style()
def classes(panels: Mapping[str, np.ndarray], path: str | Path, title: str = "") -> Path:
    """Plot heat maps of the numbers of samples, in one colour scale.

    Args:
        panels: numbers of samples `[clients, classes]` by title, one for every swept value of the data.
        path: path of the figure without its ending.
        title: title of the figure.
    """
    rows, columns = figures.shape(len(panels))
    clients, count = (max(counts.shape[axis] for counts in panels.values()) for axis in (0, 1))
    width = figures.PAGE if columns > 1 else min(max(figures.COLUMN, 2.0 + 0.2 * count), figures.PAGE)
    figure = figures.new(width, rows * min(1.2 + 0.07 * clients, 8.0))
    grid = figures.panels(figure, len(panels))
    most_samples = max(max((int(counts.max(initial=0)) for counts in panels.values()), default=0), 1)
    for axes, (name, counts) in zip(grid, panels.items(), strict=True):
        image = axes.imshow(counts, aspect="auto", cmap="Blues", interpolation="nearest", vmin=0, vmax=most_samples)
        axes.set(xlabel="class", ylabel="client", title=name)
        axes.locator_params(integer=True)
        if counts.shape[1] <= 20:
            axes.set_xticks(range(counts.shape[1]))
    figure.colorbar(image, ax=grid, label="training samples")
    return figures.close(figure, path, title)
