"""Draws the pictures of README and of the site's first page from the result files: `make pictures`.

Writes `speed.svg` (both panels), `step.svg` and `rounds.svg` into docs/pictures.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.axes import Axes

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "pictures"
STEP, FEDERATED = ("bench/results/step.json", "bench/results/federated.json")
STEP_NAMES = {  # as the result file has it: as the picture shows it
    "fastsam_native": "fastsam",
    "compiled": "torch.compile",
    "foreach": "foreach by hand",
    "pytorch_optimizer": "pytorch-optimizer",
    "copied": "the copied SAM class",
}
ROUND_NAMES = {
    "fastsam, auto": "fastsam",
    "fedjax": "FedJAX",
    "fedlab": "FedLab",
    "pfl": "pfl",
    "blazefl": "BlazeFL",
    "flower": "Flower",
    "bare loop": "a plain PyTorch loop",
}
OURS, OTHERS = ("#0b5fa5", "#9aa0a6")
STYLE: Mapping[str, Any] = {
    "svg.fonttype": "none",  # text stays text: small, searchable, and readable by a test
    "svg.hashsalt": "fastsam",  # the same file from the same numbers
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
}

Bars = dict[str, dict[str, float]]  # {problem: {contender: value}}


def step_bars() -> Bars:
    """Return the time of the optimizer part of a step by model, relative to the copied class; one thread."""
    record = json.loads((ROOT / STEP).read_text())
    return {
        case["title"].removesuffix(", 1 thread"): {
            STEP_NAMES[row["name"]]: row["eager"]["to"]["copied"]["median"]
            for row in case["rows"]
            if row["name"] in STEP_NAMES and "eager" in row
        }
        for case in record["cases"]
        if case["threads"] == 1
    }


def round_bars() -> Bars:
    """Return the rounds per second of FedAvg by model, relative to a plain PyTorch loop."""
    cases = json.loads((ROOT / FEDERATED).read_text())["cases"]
    found = {}
    for case in (case for case in cases if case["part"] == "speed"):
        model, algorithm = case["title"].split(", ")
        if algorithm == "fedavg":
            speeds = {row["name"]: row["speed"]["median"] for row in case["rows"] if "speed" in row}
            found[model] = {shown: speeds[label] for label, shown in ROUND_NAMES.items() if label in speeds}
    return found


def draw_bars(axes: Axes, bars: Bars, title: str) -> None:
    """Draw one group of bars per problem, each bar with its number."""
    at, ticks, labels = 0.0, [], []
    widest = max(max(values.values()) for values in bars.values())
    for problem, values in bars.items():
        axes.text(0, at - 0.85, problem, fontweight="bold", va="center")
        for name, value in values.items():
            ours = name == "fastsam"
            axes.barh(at, value, height=0.78, color=OURS if ours else OTHERS)
            weight = "bold" if ours else "normal"
            axes.text(value + 0.015 * widest, at, f"{value:.2f}", va="center", fontweight=weight)
            ticks.append(at)
            labels.append(name)
            at += 1
        at += 1.3
    axes.set_yticks(ticks, labels)
    axes.tick_params(length=0)
    axes.set_ylim(at - 1.7, -1.5)
    axes.set_xlim(0, 1.14 * widest)
    axes.set_xticks([])
    axes.spines["bottom"].set_visible(False)
    axes.set_title(title, loc="left", fontsize=10)


Panel = Callable[[Axes], None]


def step_panel(axes: Axes) -> None:
    """Draw the optimizer part of a step."""
    draw_bars(axes, step_bars(), "Optimizer part of a SAM step: less time is better")


def rounds_panel(axes: Axes) -> None:
    """Draw the speed of federated rounds."""
    draw_bars(axes, round_bars(), "Rounds of FedAvg per second: more is better")


def write(path: Path, *panels: Panel) -> None:
    """Draw the panels side by side. The background is white, so that the picture is readable on dark pages too."""
    with pyplot.rc_context(dict(STYLE)):
        figure, axes = pyplot.subplots(1, len(panels), figsize=(5.2 * len(panels), 4.2), squeeze=False)
        for panel, place in zip(panels, axes[0], strict=True):
            panel(place)
        figure.tight_layout(w_pad=2)
        figure.savefig(path, metadata={"Date": None}, facecolor="white")
        pyplot.close(figure)


def main(folder: Path = FOLDER) -> None:
    """Write every picture into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    write(folder / "speed.svg", step_panel, rounds_panel)
    write(folder / "step.svg", step_panel)
    write(folder / "rounds.svg", rounds_panel)


if __name__ == "__main__":
    main()
