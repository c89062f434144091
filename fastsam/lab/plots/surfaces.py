"""Loss surfaces side by side."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from fastsam.lab.plots import figure as figures

_SPAN = 1e4  # largest span of the colour scale: largest loss / smallest loss


@figures.style()
def surfaces(grids: Mapping[str, np.ndarray], radius: float, path: str | Path, title: str = "") -> Path:
    """Plot the loss on each label's grid `[points, points]` over [-radius, radius]^2, with level lines.

    All grids share one logarithmic colour scale, so that a flatter surface has fewer lines. The scale ends at 1e4 times
    the smallest loss. Losses that are not finite are shown at its end. A cross marks the weights themselves.
    """
    from matplotlib.colors import LogNorm
    from matplotlib.ticker import MaxNLocator, NullLocator, StrMethodFormatter

    rows, columns = figures.shape(len(grids))
    side = min((figures.PAGE - 0.7) / columns, 2.6)
    figure = figures.new(side * columns + 0.7, (side + 0.2) * rows + 0.3)
    panels = figures.panels(figure, len(grids))
    all_losses = np.concatenate([grid[np.isfinite(grid)] for grid in grids.values()])
    low = max(float(all_losses.min()), 1e-12) if all_losses.size else 1.0
    high = min(max(float(all_losses.max(initial=low)), 1.001 * low), _SPAN * low)
    levels = np.geomspace(low, high, 16)
    for axes, (label, grid) in zip(panels, grids.items(), strict=True):
        axis = np.linspace(-radius, radius, len(grid))
        losses = np.clip(np.nan_to_num(grid, nan=high, posinf=high), low, high)
        norm = LogNorm(levels[0], levels[-1])
        image = axes.pcolormesh(axis, axis, losses, norm=norm, cmap="viridis", shading="gouraud", rasterized=True)
        axes.contour(axis, axis, losses, levels=levels, colors="white", linewidths=0.4)
        axes.plot(0, 0, marker="+", color="red", markersize=6, markeredgewidth=1.2)
        axes.set(title=figures.wrap(label, side - 0.3), aspect="equal", xlabel="direction 1", ylabel="direction 2")
        axes.label_outer()
    shrink = min(0.9, 4 / figure.get_figheight())
    bar = figure.colorbar(image, ax=panels, label="training loss", shrink=shrink, aspect=30)
    if high < 10 * low:  # hardly a power of ten in it: round losses
        bar.ax.yaxis.set_major_locator(MaxNLocator(6))
        bar.ax.yaxis.set_minor_locator(NullLocator())
    bar.ax.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    return figures.close(figure, path, title)
