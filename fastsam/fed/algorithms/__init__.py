"""Federated algorithms, one file per paper. `registry` holds the built-in ones by lower-case name, in alphabetical
order.

Every module of this folder is imported: a dataclass derived from `Algorithm` in one of them is a built-in algorithm by
being defined, and a name of `fastsam.fed`.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from fastsam.fed.algorithms.base import (
    SAM,
    Aggregate,
    Algorithm,
    Client,
    ClientResults,
    ParameterLayout,
    Passes,
    Round,
    Rows,
    Shifted,
    State,
    Step,
    Upload,
    apply_update,
)


def _built_in() -> Iterator[type[Algorithm]]:
    """Yield the algorithms of this folder's modules, without their common base classes."""
    for module_info in pkgutil.iter_modules(__path__):
        module = importlib.import_module(f"{__name__}.{module_info.name}")
        for member in vars(module).values():
            is_algorithm = isinstance(member, type) and member.__module__ == module.__name__
            if is_algorithm and issubclass(member, Algorithm) and "__dataclass_fields__" in vars(member):
                yield member


registry: dict[str, type[Algorithm]] = {
    cls.__name__.lower().replace("_", "-"): cls for cls in sorted(_built_in(), key=lambda cls: cls.__name__.lower())
}
globals().update({cls.__name__: cls for cls in registry.values()})

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any: ...


__all__ = [
    "SAM",
    "Algorithm",
    "Client",
    "Round",
    "ClientResults",
    "ParameterLayout",
    "Passes",
    "Rows",
    "Shifted",
    "State",
    "Step",
    "Aggregate",
    "Upload",
    "apply_update",
    *(cls.__name__ for cls in registry.values()),
]
