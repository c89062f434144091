"""Robust rules in place of the mean over a round's clients, one file each (docs/robust.md). `rule_of` finds one by its
name.

Every module of this folder is imported: a subclass of `RobustAggregator` with a name is a rule by being defined.
"""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import fields

from fastsam.fed.aggregation.base import RobustAggregator, registry
from fastsam.fed.aggregation.function import Aggregation, FunctionRule
from fastsam.fed.common.checks import nearest

__all__ = ["MEAN", "Aggregation", "RobustAggregator", "names", "registry", "rule_of"]

MEAN = "mean"
for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")


def names() -> list[str]:
    """Return the names that `aggregation` takes, the mean first."""
    return [MEAN, *sorted(registry)]


def rule_of(text: object) -> RobustAggregator | None:
    """Return the rule of "name", "name:number" or a function, or None for the plain mean.

    Raises:
        ValueError: it names no rule, or the number is out of range.
    """
    if callable(text) and not isinstance(text, type):
        return FunctionRule(text)
    if isinstance(text, str) and text == MEAN:
        return None
    name, colon, argument = text.partition(":") if isinstance(text, str) else ("", "", "")
    if name not in registry:
        hint = nearest(name, names())
        raise ValueError(f"aggregation must be one of {', '.join(map(repr, names()))}, got {text!r}{hint}")
    cls, option = registry[name], next((f.name for f in fields(registry[name])), None)
    if not colon:
        return cls()
    if option is None:
        raise ValueError(f"aggregation={name!r} takes no number, got {text!r}")
    try:
        return cls(**{option: float(argument)})
    except ValueError as error:
        raise ValueError(
            f"aggregation={name + ':' + option.upper()!r} takes a number after the colon, got {text!r}: {error}"
        ) from error
