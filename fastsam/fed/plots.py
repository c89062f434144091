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
    """Test accuracy by round, and test error on a logarithmic axis, where runs near 100 % separate.

    Where no accuracy was measured: the training loss. A line per label; with several seeds their mean, in a band of one standard deviation.
    histories: label -> one history (list of metrics records) per seed. target: a dashed line at this accuracy.
    """
    figure = _figure(10.0, 4.2)
    linear, log = figure.subplots(1, 2)
    runs = {label: [series(history, "test_accuracy") for history in seeds] for label, seeds in histories.items()}
    if any(values for seeds in runs.values() for values in seeds):
        views = (lambda a: 100 * a, "test accuracy (%)"), (lambda a: 100 - 100 * a, "test error (%)")
    else:
        runs = {label: [series(history, "train_loss") for history in seeds] for label, seeds in histories.items()}
        views, target = ((lambda loss: loss, "training loss of the active clients"),) * 2, None
    for axes, (view, name) in zip((linear, log), views, strict=True):
        for label, seeds in runs.items():
            _line(axes, label, [{r: view(value) for r, value in one.items()} for one in seeds])
        if target is not None:
            axes.axhline(view(target), color="0.4", linestyle="--", linewidth=1, label=f"target {100 * target:g} %")
        axes.set(xlabel="round", ylabel=name)
        axes.spines[["top", "right"]].set_visible(False)
    _logarithmic(log)
    for axes in (linear, log):
        axes.grid(True, color="0.9", linewidth=0.6)
    linear.legend(frameon=False)
    if title:
        figure.suptitle(title)
    return _save(figure, path)


def _logarithmic(axes: Any) -> None:
    """A logarithmic y axis with plain numbers at 1, 2 and 5 of every decade."""
    from matplotlib.ticker import LogLocator, NullLocator

    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter("{x:g}")


def _line(axes: Any, label: str, seeds: Sequence[Mapping[int, float]]) -> None:
    """The mean over seeds at the rounds that all of them have."""
    rounds = sorted(set.intersection(*(set(values) for values in seeds)))
    if not rounds:
        return
    values = np.array([[one[r] for r in rounds] for one in seeds])
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
