"""Curves by round: accuracy and error, and whatever else was measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fastsam.lab.plots import figure as figures

if TYPE_CHECKING:
    from matplotlib.figure import Figure

History = Sequence[Mapping[str, Any]]
Panels = Mapping[str, Mapping[str, Sequence[History]]]  # title -> label -> a history for each seed; one panel is ""
View = tuple[Callable[[Any], Any], str, bool]  # function of a value or an array, name of the axis, True if logarithmic

# Labels of the measures' axes.
NAMES = {
    "train_set_loss": "training loss of the global model",
    "train_set_accuracy": "training accuracy of the global model",
    "sharpness": "global sharpness, one step",
    "sharpness_ascent": "global sharpness, projected ascent",
    "perturbation_drift": "perturbation drift (0 to 1)",
    "consistency": "clients' squared distance from the new model",
    "smoothness_global": "smoothness L along the path, global",
    "smoothness_clients": "smoothness L along the path, clients",
    "hessian_norm": "norm of the Hessian",
    "sigma_l": "σ_l, batches against client",
    "sigma_g": "σ_g, clients against global",
    "e_w": "drift of the weights, E_w",
    "e_delta": "drift of the perturbations, E_δ",
    "estimation_bias": "estimation bias (0 to 2)",
    "margin_risk": "margin risk at w",
    "margin_risk_perturbed": "margin risk at w + δ",
    "spectral_complexity": "spectral complexity Q",
    "dual_gap": "FedSMOO: |mean ε − s|",
}
_LOGARITHMIC = {"spectral_complexity"}


def series(history: History, key: str) -> dict[int, float]:
    """Return the values of `key` by round; rounds without evaluation have none."""
    return {record["round"]: record[key] for record in history if record.get(key) is not None}


def value_text(value: Any) -> str:
    """Return a swept value as it is shown in a label."""
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)


def deviation(values: Sequence[float] | Sequence[Sequence[float]] | np.ndarray) -> np.ndarray:
    """Return the sample's standard deviation (n - 1) over the first axis, the seeds. Zero for one seed."""
    numbers = np.asarray(values, dtype=np.float64)
    return numbers.std(axis=0, ddof=1) if len(numbers) > 1 else np.zeros(numbers.shape[1:])


@figures.style()
def curves(panels: Panels, path: str | Path, target: float | None = None, title: str = "") -> Path:
    """Plot test accuracy by round, and test error on a logarithmic axis, where runs near 100 % separate.

    There is a panel of each for every swept value. Without measured accuracies, the training loss is plotted. There is
    one line per label; with several seeds it is their mean, in a band of one standard deviation.

    `panels` has one history (list of metrics records) per seed. `target` is the accuracy of a dashed line.
    """
    views: list[View] = [
        (lambda a: 100 * a, "test accuracy (%)", False),
        (lambda a: 100 - 100 * a, "test error (%)", True),
    ]
    key, limits, labels = "test_accuracy", (0.0, 100.0), _labels(panels)
    histories = [history for lines in panels.values() for seeds in lines.values() for history in seeds]
    if not any(series(history, key) for history in histories):
        key, target, limits = "train_loss", None, (-np.inf, np.inf)
        views = [(lambda loss: loss, "training loss of the active clients", log) for log in (False, True)]
    figure, grid = _grid(len(panels), len(views))
    for column, (name, lines) in zip(grid, panels.items(), strict=True):
        for axes, (view, text, logarithmic) in zip(column, views, strict=True):
            _lines(axes, lines, key, labels, view, limits)
            if target is not None:
                goal = f"target {100 * target:g} %"
                axes.axhline(view(target), color="0.4", linestyle="--", linewidth=0.8, label=goal)
            axes.set(xlabel="round", ylabel=text, title=name)
            figures.finish(axes)
            if logarithmic:
                figures.logarithmic(axes)
    return _close(figure, grid, path, title)


@figures.style()
def measures(panels: Panels, keys: Sequence[str], path: str | Path, title: str = "") -> Path:
    """Draw one small plot by round for each of `keys` and every swept value.

    Lines and bands are as in `curves`. Only records that have the key are used.
    """
    labels = _labels(panels)
    if len(panels) == 1:
        rows, columns = figures.shape(len(keys))
        figure = figures.new(figures.PAGE * columns / 3 if columns > 1 else figures.COLUMN, 2.2 * rows + 0.4)
        grid = [figures.panels(figure, len(keys))]
    else:
        figure, grid = _grid(len(panels), len(keys))
    for column, (name, lines) in zip(grid, panels.items(), strict=True):
        for axes, key in zip(column, keys, strict=True):
            _lines(axes, lines, key, labels)
            inches = figure.get_figwidth() / axes.get_subplotspec().get_gridspec().ncols - 0.3
            axis_label = figures.wrap(NAMES.get(key, key.replace("_", " ")), inches)
            axes.set(xlabel="round", title=f"{axis_label}\n{name}" if name else axis_label)
            figures.finish(axes)
            if key in _LOGARITHMIC:
                figures.logarithmic(axes)
    return _close(figure, grid, path, title)


def _close(figure: Figure, grid: Sequence[Sequence[Any]], path: str | Path, title: str) -> Path:
    """Save a figure, after the panels of a view got one range, and only the first of them a label."""
    for row in zip(*grid, strict=True) if len(grid) > 1 else ():
        ranges = [axes.get_ylim() for axes in row]
        for axes in row:
            axes.set_ylim(min(low for low, _ in ranges), max(high for _, high in ranges))
            if not axes.get_subplotspec().is_first_col():
                axes.set_ylabel("")
    figures.legend(figure, [axes for column in grid for axes in column])
    return figures.close(figure, path, title)


def _labels(panels: Panels) -> list[str]:
    """Return the labels of the whole figure, because a label looks the same in all panels."""
    return list(dict.fromkeys(label for lines in panels.values() for label in lines))


def _grid(panels: int, views: int) -> tuple[Figure, list[list[Any]]]:
    """Return a figure with a column of `views` axes for every panel, and its axes.

    A single panel has its views side by side. After three panels a new block of rows begins.
    """
    if panels == 1:
        figure = figures.new(figures.PAGE, 2.9)
        return figure, [list(figure.subplots(1, views, squeeze=False)[0])]
    blocks, columns = figures.shape(panels)
    figure = figures.new(figures.PAGE, 2.2 * views * blocks + 0.5)
    all_axes = figure.subplots(blocks * views, columns, squeeze=False)
    for place in range(panels, blocks * columns):
        for view in range(views):
            all_axes[place // columns * views + view, place % columns].set_axis_off()
    return figure, [
        [all_axes[i // columns * views + view, i % columns] for view in range(views)] for i in range(panels)
    ]


def _lines(
    axes: Any,
    lines: Mapping[str, Sequence[History]],
    key: str,
    labels: Sequence[str],
    view: Callable[[np.ndarray], np.ndarray] = np.asarray,
    limits: tuple[float, float] = (-np.inf, np.inf),
) -> None:
    """Draw for each label the mean of `view(key)` over its seeds, in a band of one standard deviation within `limits`.

    Only rounds that all seeds of a label have are drawn.
    """
    axes.locator_params(axis="x", integer=True)
    styles = figures.styles(labels)
    for label, histories in lines.items():
        seeds, style = [series(history, key) for history in histories], styles[label]
        rounds = sorted(set.intersection(*(set(values) for values in seeds)))
        if not rounds:
            continue
        values = view(np.array([[seed[r] for r in rounds] for seed in seeds]))
        mean, spread = values.mean(axis=0), deviation(values)
        name = label if len(seeds) == 1 else f"{label} ({len(seeds)} seeds)"
        axes.plot(rounds, mean, label=name, marker="o" if len(rounds) <= 5 else None, markersize=3, **style)
        if len(seeds) > 1:
            alpha = 0.18 if len(lines) <= 5 else 0.08  # many bands would hide the lines
            low, high = np.clip([mean - spread, mean + spread], *limits)
            axes.fill_between(rounds, low, high, color=style["color"], alpha=alpha, linewidth=0)
