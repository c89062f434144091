"""Accelerate: from a prepared optimizer to the `FusedSAM` in it."""

from __future__ import annotations

from typing import Any

from fastsam.optim import FusedSAM


def unwrap_optimizer(optimizer: Any) -> FusedSAM:
    """Return the `FusedSAM` in an optimizer that `accelerator.prepare` wrapped, or the `FusedSAM` itself.

    Make the first half of a step with it, `unwrap_optimizer(optimizer).first_step(zero_grad=True)`, and the second with
    the prepared `optimizer.step()`, which uses Accelerate's GradScaler if there is one. Raises TypeError for an
    optimizer without a FusedSAM in it.
    """
    inner = optimizer
    while not isinstance(inner, FusedSAM):
        if (inner := getattr(inner, "optimizer", None)) is None:
            raise TypeError(f"expected a FusedSAM, or what accelerator.prepare makes of it, got {_chain(optimizer)}")
    return inner


def _chain(optimizer: Any) -> str:
    """The classes of an optimizer and of those that it wraps."""
    names = []
    while optimizer is not None:
        names.append(type(optimizer).__name__)
        optimizer = getattr(optimizer, "optimizer", None)
    return " around ".join(names) or "None"
