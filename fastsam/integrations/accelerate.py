"""Accelerate: from a prepared optimizer to the `FusedSAM` in it."""

from __future__ import annotations

from typing import Any

from fastsam.optim import FusedSAM


def unwrap_optimizer(optimizer: Any) -> FusedSAM:
    """Return the `FusedSAM` in an optimizer that `accelerator.prepare` wrapped, or the `FusedSAM` itself.

    Use the result for the first half of a step: `unwrap_optimizer(optimizer).first_step(zero_grad=True)`. Make the
    second half with the prepared `optimizer.step()`, which uses Accelerate's GradScaler when mixed precision needs one.

    Raises:
        TypeError: The optimizer contains no FusedSAM.
    """
    inner = optimizer
    while not isinstance(inner, FusedSAM):
        if (inner := getattr(inner, "optimizer", None)) is None:
            raise TypeError(f"expected a FusedSAM or a prepared FusedSAM, got {_chain(optimizer)}")
    return inner


def _chain(optimizer: Any) -> str:
    """Return the class names of an optimizer and of the optimizers that it wraps."""
    names = []
    while optimizer is not None:
        names.append(type(optimizer).__name__)
        optimizer = getattr(optimizer, "optimizer", None)
    return " around ".join(names) or "None"
