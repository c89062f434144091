"""Metrics of the global model's outputs on the test set: by name, as functions, as objects that accumulate
(torchmetrics)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from fastsam.fed.common.checks import nearest, number
from fastsam.fed.measures.tasks import METRICS, THRESHOLDS

Metric = Callable[[Tensor, Tensor], float]  # of all outputs [n, ...] and labels [n, ...]
_OBJECT = ("reset", "update", "compute")
_TAKEN = ("accuracy", "loss")  # the run's own


def resolve(metrics: Sequence[str] | Mapping[str, Any]) -> dict[str, Metric]:
    """The metrics by name. A list names some of `METRICS`; a dict has names, functions `(outputs, labels) -> number`,
    or objects with `reset`, `update(outputs, labels)` and `compute`, under names of their own.

    Raises ValueError for a name that does not exist or is taken, and for what is no metric.
    """
    if isinstance(metrics, str):
        raise ValueError(f"metrics must be a list of names, or a dict, got the string {metrics!r}; write [{metrics!r}]")
    if not isinstance(metrics, (Sequence, Mapping)):
        raise ValueError(f"metrics must be a list of names, or a dict, got {type(metrics).__name__}")
    if not isinstance(metrics, Mapping):
        metrics = {str(text).partition(":")[0]: text for text in metrics}
    for name in metrics:
        if not isinstance(name, str) or not name.isidentifier():
            raise ValueError(f"metrics: {name!r} is a part of a record's keys and must be an identifier, such as 'f1'")
        if name in _TAKEN:
            raise ValueError(f"metrics: {name!r} is what the run itself reports; choose another name")
    return {name: _made(name, metric) for name, metric in metrics.items()}


def _made(name: str, metric: Any) -> Metric:
    if isinstance(metric, str):
        return _named(metric)
    if isinstance(metric, type):
        raise ValueError(f"metrics: {name!r} is a class; write {metric.__name__}()")
    if all(callable(getattr(metric, method, None)) for method in _OBJECT):
        return partial(_checked, name, partial(_accumulated, metric))
    if not callable(metric):
        raise ValueError(
            f"metrics: {name!r} must be the name of a metric, a function (outputs, labels) -> number, or an object "
            f"with "
            f"{', '.join(_OBJECT)}, got {metric!r}"
        )
    return partial(_checked, name, metric)


def _named(text: str) -> Metric:
    """The metric of "name" or "name:threshold"."""
    name, colon, given = text.partition(":")
    if name not in METRICS:
        known = ", ".join(f"{one} or {one}:THRESHOLD" if one in THRESHOLDS else one for one in METRICS)
        raise ValueError(
            f"unknown metric {name!r}{nearest(name, METRICS)}; choose from {known}, or hand over a function in a dict"
        )
    if not colon:
        return partial(_checked, name, METRICS[name])
    if name not in THRESHOLDS:
        raise ValueError(
            f"metrics: {name!r} takes no number, got {text!r}; those that do: {', '.join(sorted(THRESHOLDS))}"
        )
    try:
        threshold = float(given)
    except ValueError:
        raise ValueError(f"metrics: the threshold of {name!r} must be a number, got {given!r}") from None
    return partial(
        _checked, name, partial(METRICS[name], threshold=number(f"metrics: the threshold of {name!r}", threshold))
    )


def _accumulated(metric: Any, outputs: Tensor, labels: Tensor) -> Any:
    metric.reset()
    metric.update(outputs, labels)
    return metric.compute()


def _checked(name: str, metric: Callable[[Tensor, Tensor], Any], outputs: Tensor, labels: Tensor) -> float:
    """The metric's value. Raises ValueError for a metric that raises, or returns something else than one number."""
    try:
        value = metric(outputs, labels)
    except Exception as error:
        raise ValueError(
            f"the metric {name!r} failed on outputs {list(outputs.shape)} and labels {list(labels.shape)}: "
            f"{type(error).__name__}: {error}"
        ) from error
    many = isinstance(value, Tensor) and value.numel() != 1
    if many or isinstance(value, (str, bytes)) or not hasattr(value, "__float__"):
        got = f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else repr(value)
        raise ValueError(f"the metric {name!r} must return one number, got {got}")
    return float(value)
