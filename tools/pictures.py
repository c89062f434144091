"""Draws the pictures of README and of the pages: `make pictures`.

Most show the result files: steps, federated rounds, a GPU. `surfaces-sgd.svg` and `surfaces-sam.svg` show
docs/pictures/surfaces.json (tools/surfaces.py). tools/speeds.py has the numbers of the bars, and tools/diagrams.py the
diagrams. A file has one panel, as wide as the page of a phone. A wide page has two files in a row, a phone one below
the other. `variants-*.svg` show closed results and are not drawn again.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure

from tools import diagrams, speeds
from tools.speeds import COMPILED, Bars

FOLDER = Path(__file__).parents[1] / "docs" / "pictures"
OUR_COLOUR, PLAIN_COLOUR, PEER_COLOUR = ("#0b5fa5", "#7fb2dd", "#9aa0a6")
PHONE = 3.7  # inches, 355 pixels: the width of a page on a phone
STYLE: dict[str, Any] = {
    "svg.fonttype": "none",  # text stays text: small, searchable, and readable by a test
    "svg.hashsalt": "fastsam",  # the same file from the same drawing and numbers
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
}


def draw_bars(axes: Axes, bars: Bars, title: str) -> None:
    """Draw one group of bars per problem, each bar with its number. Each problem has its own scale."""
    height, labels = 0.0, {}
    for problem, values in bars.items():
        axes.text(0, height - 0.85, problem, fontweight="bold", va="center")
        widest = max(values.values())
        for name, value in values.items():
            is_ours = name.startswith("fastsam")
            colour = OUR_COLOUR if name.startswith(COMPILED) else PLAIN_COLOUR if is_ours else PEER_COLOUR
            axes.barh(height, value / widest, height=0.78, color=colour)
            axes.text(
                value / widest + 0.015, height, f"{value:.2f}", va="center", weight="bold" if is_ours else "normal"
            )
            labels[height] = name
            height += 1
        height += 1.5
    axes.set_yticks([*labels], [*labels.values()])
    axes.tick_params(length=0)
    axes.set(xlim=(0, 1.35), ylim=(height - 1.9, -1.5), xticks=[])
    axes.spines["bottom"].set_visible(False)
    axes.figure.suptitle(title, x=0.02, ha="left", fontsize=10)


def draw_surface(axes: Axes, grid: list[list[float]], title: str, lowest: float, highest: float) -> None:
    """Draw the training loss around a model, on the colours that all panels share."""
    axis = [2 * i / (len(grid) - 1) - 1 for i in range(len(grid))]
    levels = [lowest * (highest / lowest) ** (i / 14) for i in range(15)]
    axes.contourf(axis, axis, grid, levels=levels, norm=LogNorm(lowest, highest), cmap="Blues_r", extend="both")
    contours = axes.contour(axis, axis, grid, levels=[0.01, 0.1, 1.0], colors="black", linewidths=0.8)
    axes.clabel(contours, fmt="%g", fontsize=8)
    axes.plot(0, 0, marker="o", color="#c4581a", markersize=5)
    axes.set_title(title, loc="left", fontsize=10)
    axes.set(xticks=[-1, 0, 1], yticks=[-1, 0, 1], aspect="equal")


def draw_panel(draw: Callable[[Axes], None], height: float) -> Figure:
    """Return a figure with one panel."""
    figure, axes = pyplot.subplots(figsize=(PHONE, height))
    draw(axes)
    figure.tight_layout()
    return figure


TIME, ROUNDS = ("time: less is better", "rounds of FedAvg per second: more is better")
PERCENT = "test accuracy in percent: more is better"


def bar_panels() -> dict[str, Callable[[], Figure]]:
    """Return the panels of bars by file. The second line of a title says what they are, and which ones are better."""
    gpu, two = speeds.gpu_name(), speeds.first_sizes(2)
    table: dict[str, tuple[Callable[[], Bars], str, str]] = {
        "step": (speeds.step_bars, "Optimizer part of a SAM step, one thread", TIME),
        "whole-step": (speeds.whole_bars, "Whole training step with SAM, one thread", TIME),
        "rounds-unequal": (partial(speeds.round_bars, 1, speeds.UNEQUAL), "Unequal clients, one core", ROUNDS),
        "rounds-two-cores": (partial(speeds.round_bars, 2, two), f"{two.capitalize()}, two cores", ROUNDS),
        "rounds-digits": (partial(speeds.round_bars, 1, speeds.DIGITS), "Digits with alpha 0.3, one core", ROUNDS),
        "rounds-equal": (partial(speeds.round_bars, 1, speeds.EQUAL), "Equal clients, one core", ROUNDS),
        "gpu-step": (partial(speeds.gpu_step_bars, "eager"), f"{gpu}: optimizer part of a SAM step", TIME),
        "gpu-captured": (partial(speeds.gpu_step_bars, "replayed"), f"{gpu}: SAM step in a CUDA graph", TIME),
        "gpu-rounds": (speeds.gpu_round_bars, gpu, ROUNDS),
        "accuracy": (speeds.accuracy_bars, "MNIST-1D, mean of eight seeds", PERCENT),
    }
    return {
        f"{name}.svg": partial(draw_panel, lambda axes, b=bars, t=f"{title},\n{unit}": draw_bars(axes, b(), t), 4.4)
        for name, (bars, title, unit) in table.items()
    }


def surface_panels() -> dict[str, Callable[[], Figure]]:
    """Return a panel for each trained model by file."""
    grids = json.loads((FOLDER / "surfaces.json").read_text())
    values = [value for grid in grids.values() for row in grid for value in row]
    limits = {"lowest": min(values), "highest": max(values)}
    panels = {name: partial(draw_surface, grid=grid, title=name, **limits) for name, grid in grids.items()}
    return {f"surfaces-{n.partition(',')[0].lower()}.svg": partial(draw_panel, p, PHONE) for n, p in panels.items()}


def main(folder: Path = FOLDER) -> None:
    """Write every picture into `folder`, on white, so that it is readable on dark pages too."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, draw in (bar_panels() | surface_panels() | diagrams.DIAGRAMS).items():
        with pyplot.rc_context(STYLE):
            figure = draw()
            figure.savefig(folder / name, metadata={"Date": None}, facecolor="white")
            pyplot.close(figure)


if __name__ == "__main__":
    main()
