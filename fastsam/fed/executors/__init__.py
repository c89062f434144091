"""How a cohort of clients trains. `registry` holds the executors by name; `choose` makes the one that a run asks for.

Every module of this folder is imported: an executor is there by being defined.
"""

from __future__ import annotations

import importlib
import pkgutil

from fastsam.fed.executors.auto import AUTO, Choice, choose
from fastsam.fed.executors.base import ClientError, Ends, Executor, LocalOptions, Setup, Task, Work, divided, registry

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")


def names() -> tuple[str, ...]:
    """What the keyword `executor` takes."""
    return (AUTO, *sorted(registry))


def stacks(name: str) -> bool:
    """Whether a run with these keywords sends several clients through one call of a model with convolutions ("auto"
    does not by itself)."""
    return name != AUTO and registry[name].stacks


__all__ = [
    "AUTO",
    "Choice",
    "ClientError",
    "Ends",
    "Executor",
    "LocalOptions",
    "Setup",
    "Task",
    "Work",
    "choose",
    "divided",
    "names",
    "registry",
    "stacks",
]
