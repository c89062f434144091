"""Curves by round: accuracy, or whatever else was measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fastsam.lab.plots import figure as figures

History = Sequence[Mapping[str, Any]]
ACCURACY, LOSS = "test_accuracy", "train_loss"  # keys of records

# Names of the measures, in tables and on axes.
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
_AXES = {ACCURACY: "test accuracy (%)", LOSS: "training loss of the active clients"}
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
def curve(
    lines: Mapping[str, Sequence[History]], path: str | Path, title: str = "", key: str = ACCURACY,
    target: float | None = None,
) -> Path:  # fmt: skip
    """Plot `key` by round: a line for each label. With several seeds it is their mean, in a band of one standard
    deviation. Only rounds that all seeds of a label have are drawn.

    Args:
        lines: for each label a history (list of metrics records) per seed.
        path: path of the figure's PNG.
        title: title of the figure.
        key: key of the records.
        target: value of a dashed line.
    """
    unit = 100 if key == ACCURACY else 1  # accuracies are in percent
    limits = (0, 100) if key == ACCURACY else (-np.inf, np.inf)
    figure = figures.new(figures.COLUMN, 2.9)
    axes, styles = figure.subplots(), figures.styles(lines)
    for label, histories in lines.items():
        seeds, style = [series(history, key) for history in histories], styles[label]
        rounds = sorted(set.intersection(*(set(values) for values in seeds)))
        if not rounds:
            continue
        values = unit * np.array([[seed[r] for r in rounds] for seed in seeds])
        mean, spread = values.mean(axis=0), deviation(values)
        name = label if len(seeds) == 1 else f"{label} ({len(seeds)} seeds)"
        axes.plot(rounds, mean, label=name, marker="o" if len(rounds) <= 5 else None, markersize=3, **style)
        if len(seeds) > 1:
            alpha = 0.18 if len(lines) <= 5 else 0.08  # many bands would hide the lines
            low, high = np.clip([mean - spread, mean + spread], *limits)
            axes.fill_between(rounds, low, high, color=style["color"], alpha=alpha, linewidth=0)
    if target is not None:
        goal = f"target {unit * target:g}{' %' * (key == ACCURACY)}"
        axes.axhline(unit * target, color="0.4", linestyle="--", linewidth=0.8, label=goal)
    axes.locator_params(axis="x", integer=True)
    axes.set(xlabel="round", ylabel=figures.wrap(_AXES.get(key) or name_of(key), 2.4))
    figures.finish(axes)
    if key in _LOGARITHMIC:
        figures.logarithmic(axes)
    figures.legend(figure, [axes])
    return figures.close(figure, path, title)


def name_of(key: str) -> str:
    """Return the name of a measure or metric."""
    return NAMES.get(key, key.replace("_", " "))
