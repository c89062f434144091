"""The base optimizer: made over the groups that it shares with FusedSAM, and stepped."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch.optim import SGD, Adam, AdamW, Optimizer

from .scalars import NUMBERS, OWN_OPTIONS, check_number


def make_base(factory: Callable[..., Optimizer], groups: list[dict[str, Any]], options: dict[str, Any]) -> Optimizer:
    """The base optimizer, over the very dicts of `groups`. Raises ValueError for one that cannot be the base, TypeError for what is none
    and for an option that is not a number."""
    if factory in (SGD, Adam, AdamW):  # which compare before they look; others may take what they like
        for number, group in enumerate(groups):
            for name in NUMBERS:
                if name in group:
                    check_number(group, name, number)
    base = factory(groups, **options)
    if not isinstance(base, Optimizer):
        raise TypeError(f"base_optimizer must make a torch.optim.Optimizer, {factory!r} made a {type(base).__name__}")
    taken = sorted(set(OWN_OPTIONS) & set(base.defaults))
    if taken:
        raise ValueError(
            f"{type(base).__name__} has options of its own called {', '.join(taken)}, which are SAM's here; it cannot be the base"
        )
    closure = inspect.signature(unhooked_step(base)).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ValueError(
            f"{type(base).__name__} calls a closure several times per step, so it cannot be the base of a step with two passes"
        )
    return base


def unhooked_step(base: Optimizer) -> Callable[..., Any]:
    """The base optimizer's step without the hooks that torch puts around it: ours fire already."""
    step = type(base).step
    return step.__wrapped__ if getattr(step, "hooked", False) else step  # type: ignore[attr-defined]
