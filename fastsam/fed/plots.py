"""The plots of a run or comparison, as PNG files: accuracy by round, and who holds which classes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.figure import Figure

History = Sequence[Mapping[str, Any]]


def series(history: History, key: str) -> dict[int, float]:
    """round -> value, of the rounds that have one (rounds without evaluation have none)."""
    return {record["round"]: record[key] for record in history if record.get(key) is not None}


def curves(
    histories: Mapping[str, Sequence[History]], path: str | Path, target: float | None = None, title: str = ""
) -> Path:
    """Test accuracy and test loss by round: a line per label; with several seeds their mean, in a band of one standard deviation.

    histories: label -> one history (list of metrics records) per seed. target: a dashed line at this accuracy.
    """
    figure = _figure(10.0, 4.2)
    accuracy, loss = figure.subplots(1, 2)
    for label, seeds in histories.items():
        _line(accuracy, label, [series(history, "test_accuracy") for history in seeds], 100.0)
        _line(loss, label, [series(history, "test_loss") for history in seeds], 1.0)
    if target is not None:
        accuracy.axhline(100 * target, color="0.4", linestyle="--", linewidth=1, label=f"target {100 * target:g} %")
    accuracy.set(xlabel="round", ylabel="test accuracy (%)")
    loss.set(xlabel="round", ylabel="test loss", yscale="log")
    for axes in (accuracy, loss):
        axes.grid(True, which="both", color="0.9", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    accuracy.legend(frameon=False, loc="lower right")
    if title:
        figure.suptitle(title)
    return _save(figure, path)


def _line(axes: Any, label: str, seeds: Sequence[Mapping[int, float]], scale: float) -> None:
    """The mean over seeds at the rounds that all of them have."""
    rounds = sorted(set.intersection(*(set(values) for values in seeds)))
    if not rounds:
        return
    values = scale * np.array([[one[r] for r in rounds] for one in seeds])
    mean, spread = values.mean(axis=0), values.std(axis=0)
    (line,) = axes.plot(
        rounds,
        mean,
        label=label if len(seeds) == 1 else f"{label} ({len(seeds)} seeds)",
        linewidth=1.6,
        marker="o" if len(rounds) == 1 else None,
    )
    if len(seeds) > 1:
        axes.fill_between(rounds, mean - spread, mean + spread, color=line.get_color(), alpha=0.2, linewidth=0)


def classes(counts: np.ndarray, path: str | Path, title: str = "") -> Path:
    """Heat map of who holds which classes. counts: [clients, classes] numbers of samples."""
    clients, count = counts.shape
    figure = _figure(min(3.0 + 0.35 * count, 14.0), min(2.0 + 0.14 * clients, 14.0))
    axes = figure.subplots()
    image = axes.imshow(counts, aspect="auto", cmap="Blues", interpolation="nearest", vmin=0)
    axes.set(xlabel="class", ylabel="client")
    if count <= 20:
        axes.set_xticks(range(count))
    figure.colorbar(image, ax=axes, label="training samples")
    if title:
        axes.set_title(title)
    return _save(figure, path)


def _figure(width: float, height: float) -> Figure:
    """A figure of its own: no pyplot, hence no global state and no display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _save(figure: Figure, path: str | Path) -> Path:
    path = Path(path)
    figure.savefig(path, dpi=130)
    return path
