"""Metrics of the global model's outputs on the test set: functions, or objects that accumulate (torchmetrics)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import Tensor

Metric = Callable[[Tensor, Tensor], float]  # function of all outputs [n, ...] and labels [n, ...]
_OBJECT = ("reset", "update", "compute")
_RESERVED = ("accuracy", "loss")  # the run's own


def resolve(metrics: Mapping[str, Any] | None) -> dict[str, Metric]:
    """Return the metrics by name, checked.

    Args:
        metrics: functions `(outputs, labels) -> number`, or objects with `reset`, `update(outputs, labels)` and
            `compute`, by name; None: no metrics.

    Raises:
        ValueError: if `metrics` is not a dict, if a name is taken or not an identifier, or if a value is not a metric.
    """
    if metrics is None:
        return {}
    if not isinstance(metrics, Mapping):
        raise ValueError(
            f"metrics must be a dict of functions (outputs, labels) -> number, got {metrics!r}. Write metrics={{'f1': "
            "function}"
        )
    for name in metrics:
        if not isinstance(name, str) or not name.isidentifier():
            raise ValueError(f"metrics: {name!r} is a part of a record's keys and must be an identifier, such as 'f1'")
        if name in _RESERVED:
            raise ValueError(f"metrics: {name!r} is a name that the run reports itself. Choose another name")
    return {name: _metric_of(name, metric) for name, metric in metrics.items()}


def _metric_of(name: str, metric: Any) -> Metric:
    if isinstance(metric, type):
        raise ValueError(f"metrics: {name!r} is a class; write {metric.__name__}()")
    if all(callable(getattr(metric, method, None)) for method in _OBJECT):
        return partial(_call_metric, name, partial(_accumulate, metric))
    if not callable(metric):
        raise ValueError(
            f"metrics: {name!r} must be a function (outputs, labels) -> number, or an object with "
            f"{', '.join(_OBJECT)}, got {metric!r}"
        )
    return partial(_call_metric, name, metric)


def _accumulate(metric: Any, outputs: Tensor, labels: Tensor) -> Any:
    metric.reset()
    metric.update(outputs, labels)
    return metric.compute()


def _call_metric(name: str, metric: Callable[[Tensor, Tensor], Any], outputs: Tensor, labels: Tensor) -> float:
    """Return the metric's value. Raises ValueError for a metric that raises, or returns something else than one
    number."""
    try:
        value = metric(outputs, labels)
    except Exception as error:
        raise ValueError(
            f"the metric {name!r} failed on outputs {list(outputs.shape)} and labels {list(labels.shape)}: "
            f"{type(error).__name__}: {error}"
        ) from error
    is_vector = isinstance(value, Tensor) and value.numel() != 1
    if is_vector or isinstance(value, (str, bytes)) or not hasattr(value, "__float__"):
        description = f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else repr(value)
        raise ValueError(f"the metric {name!r} must return one number, got {description}")
    return float(value)
