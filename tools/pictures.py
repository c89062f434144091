"""Draws the pictures of README and of the pages: `make pictures`.

Most show the result files: steps, federated rounds, a GPU, and SAM's variants. `surfaces-sgd.svg` and
`surfaces-sam.svg` show docs/pictures/surfaces.json (tools/surfaces.py). tools/speeds.py has the numbers of the bars,
and tools/diagrams.py the diagrams. A file has one panel, as wide as the page of a phone. A wide page has two files in a
row, a phone one below the other.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from statistics import fmean

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm

from bench.contenders import VARIANTS
from tools import diagrams, speeds
from tools.speeds import COMPILED, Bars

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "pictures"
ACCURACY, SURFACES = ("bench/results/closed/accuracy.json", "docs/pictures/surfaces.json")
OUR_COLOUR, PLAIN_COLOUR, PEER_COLOUR = ("#0b5fa5", "#7fb2dd", "#9aa0a6")
PHONE = 3.7  # inches, 355 pixels: the width of a page on a phone
STYLE = diagrams.STYLE | {"axes.spines.top": False, "axes.spines.right": False}


def draw_bars(axes: Axes, bars: Bars, title: str) -> None:
    """Draw one group of bars per problem, each bar with its number. Each problem has its own scale."""
    height, ticks, labels = 0.0, [], []
    for problem, values in bars.items():
        axes.text(0, height - 0.85, problem, fontweight="bold", va="center")
        widest = max(values.values())
        for name, value in values.items():
            is_ours = name.startswith("fastsam")
            colour = OUR_COLOUR if name.startswith(COMPILED) else PLAIN_COLOUR if is_ours else PEER_COLOUR
            axes.barh(height, value / widest, height=0.78, color=colour)
            weight = "bold" if is_ours else "normal"
            axes.text(value / widest + 0.015, height, f"{value:.2f}", va="center", fontweight=weight)
            ticks.append(height)
            labels.append(name)
            height += 1
        height += 1.5
    axes.set_yticks(ticks, labels)
    axes.tick_params(length=0)
    axes.set_ylim(height - 1.9, -1.5)
    axes.set_xlim(0, 1.35)
    axes.set_xticks([])
    axes.spines["bottom"].set_visible(False)
    axes.figure.suptitle(title, x=0.02, ha="left", fontsize=10)


def variant_points() -> dict[str, dict[str, tuple[float, float]]]:
    """Return for right and for wrong labels each variant's time of a step and its gain over SGD in points.

    Both are means over the tasks. The time of SGD is 1, and the gain is at an equal number of steps.
    """
    cases = json.loads((ROOT / ACCURACY).read_text())["cases"]
    points: dict[str, dict[str, tuple[float, float]]] = {}
    for words, noisy in (("Wrong labels", True), ("Right labels", False)):
        tasks = [{row["name"]: row for row in case["rows"]} for case in cases if bool(case["noise"]) == noisy]
        points[words] = {
            name: (
                fmean(task[name]["cost"] for task in tasks),
                100 * fmean(task[name]["steps"]["mean"] - task["SGD"]["steps"]["mean"] for task in tasks),
            )
            for name in tasks[0]
            if name in (*VARIANTS, "SGD, half the steps") and all(name in task for task in tasks)
        }
    return points


def draw_points(axes: Axes, points: Mapping[str, tuple[float, float]], title: str) -> None:
    """Draw a named point per variant; names move apart if they would overlap.

    A point far note the others is drawn at the lower end, with its gain after its name.
    """
    gains = sorted(gain for _, gain in points.values())
    bottom = min(gains[2], 0.0)
    lowest = bottom - 0.15 * (gains[-1] - bottom)
    clipped_points = {name: (time, max(gain, lowest)) for name, (time, gain) in points.items()}
    axes.axhline(0, color=PEER_COLOUR, linewidth=1)
    axes.plot(1, 0, marker="s", color="black", markersize=4)
    axes.text(0.97, 0, "SGD", va="center", ha="right")
    span = max(gain for _, gain in clipped_points.values()) - lowest
    positions: list[float] = []
    for name, (time, gain) in sorted(clipped_points.items(), key=lambda item: -item[1][1]):
        height = gain
        while any(abs(height - position) < 0.046 * span for position in positions):
            height -= 0.005 * span
        positions.append(height)
        one_pass = name in ("MSAM", "LastGradient")
        note = f" ({points[name][1]:.1f})" if gain > points[name][1] else ""
        axes.plot(time, gain, marker="v" if note else "o", markersize=5, color=OUR_COLOUR if one_pass else PEER_COLOUR)
        axes.plot([time, 3.02], [gain, height], color=PEER_COLOUR, linewidth=0.4, zorder=0)
        axes.text(3.05, height, f"{name}{note}", va="center", color=OUR_COLOUR if one_pass else "black")
    axes.set_xlim(0.4, 3.0)
    axes.set_xlabel("time of a step, SGD = 1")
    axes.set_ylabel("gain over SGD, percentage points")
    axes.set_title(title, loc="left", fontsize=10)


def draw_surface(axes: Axes, grid: list[list[float]], title: str, lowest: float, highest: float) -> None:
    """Draw the training loss around a model, on the colours that all panels share."""
    axis = [2 * i / (len(grid) - 1) - 1 for i in range(len(grid))]
    steps = 14
    levels = [lowest * (highest / lowest) ** (i / steps) for i in range(steps + 1)]
    axes.contourf(axis, axis, grid, levels=levels, norm=LogNorm(lowest, highest), cmap="Blues_r", extend="both")
    contours = axes.contour(axis, axis, grid, levels=[0.01, 0.1, 1.0], colors="black", linewidths=0.8)
    axes.clabel(contours, fmt="%g", fontsize=8)
    axes.plot(0, 0, marker="o", color="#c4581a", markersize=5)
    axes.set_title(title, loc="left", fontsize=10)
    axes.set_xticks([-1, 0, 1])
    axes.set_yticks([-1, 0, 1])
    axes.set_aspect("equal")


Panel = Callable[[Axes], None]
TIME, ROUNDS = ("time: less is better", "rounds of FedAvg per second: more is better")
PERCENT = "test accuracy in percent: more is better"


def bar_panels() -> dict[str, Panel]:
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
        f"{name}.svg": lambda axes, b=bars, t=f"{title},\n{unit}": draw_bars(axes, b(), t)
        for name, (bars, title, unit) in table.items()
    }


def variants_panels() -> dict[str, Panel]:
    """Return the panels of accuracy against time by file."""
    return {
        f"variants-{title.split()[0].lower()}.svg": lambda axes, t=title, p=points: draw_points(axes, p, t)
        for title, points in variant_points().items()
    }


def surface_panels() -> dict[str, Panel]:
    """Return a panel for each trained model by file."""
    grids = json.loads((ROOT / SURFACES).read_text())
    values = [value for grid in grids.values() for row in grid for value in row]
    limits = min(values), max(values)
    return {
        f"surfaces-{name.partition(',')[0].lower()}.svg": lambda axes, n=name, g=grid: draw_surface(axes, g, n, *limits)
        for name, grid in grids.items()
    }


def write(path: Path, panel: Panel, height: float = PHONE) -> None:
    """Draw a panel. The background is white, so that the picture is readable on dark pages too."""
    with pyplot.rc_context(STYLE):
        figure, axes = pyplot.subplots(figsize=(PHONE, height))
        panel(axes)
        figure.tight_layout()
        figure.savefig(path, metadata={"Date": None}, facecolor="white")
        pyplot.close(figure)


def main(folder: Path = FOLDER) -> None:
    """Write every picture into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, panel in (bar_panels() | variants_panels()).items():
        write(folder / name, panel, height=4.4)
    for name, panel in surface_panels().items():
        write(folder / name, panel)
    diagrams.main(folder)


if __name__ == "__main__":
    main()
