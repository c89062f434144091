"""The update rules, one per file: `RULES` has them by name."""

from __future__ import annotations

import importlib
import pkgutil

from ..rule import UpdateRule

RULES: dict[str, UpdateRule] = {
    module.name: importlib.import_module(f"{__name__}.{module.name}").RULE for module in pkgutil.iter_modules(__path__)
}


def find(name: str) -> UpdateRule:
    """Return the rule of this name. Raises ValueError for an unknown name."""
    if name not in RULES:
        raise ValueError(f"rule must be one of {', '.join(RULES)}, got {name!r}")
    return RULES[name]
