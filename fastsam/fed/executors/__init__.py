"""Executors: how the clients of a cohort are trained. `registry` has them by name; `choose` makes the one for a run.

Every module of this folder is imported, so a subclass of `Executor` with a name is registered by its definition.
"""

from __future__ import annotations

import importlib
import pkgutil

from fastsam.fed.executors.auto import AUTO, Choice, choose
from fastsam.fed.executors.base import ClientError, ClientOutcome, Executor, registry
from fastsam.fed.executors.task import LocalOptions, Setup, Task

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")


def names() -> tuple[str, ...]:
    """Return the values of the option `executor`."""
    return (AUTO, *sorted(registry))


def stacks(name: str) -> bool:
    """Return True if this value of `executor` may send several clients through one call of a model with convolutions.
    ("auto" does not.)"""
    return name != AUTO and registry[name].stacks


__all__ = [
    "AUTO",
    "Choice",
    "ClientError",
    "ClientOutcome",
    "Executor",
    "LocalOptions",
    "Setup",
    "Task",
    "choose",
    "names",
    "registry",
    "stacks",
]
