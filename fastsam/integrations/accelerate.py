"""Accelerate: from a prepared optimizer to the `FusedSAM` in it."""

from __future__ import annotations

from typing import Any

from fastsam.optim import FusedSAM


def sam_of(optimizer: Any) -> FusedSAM:
    """The `FusedSAM` that `accelerator.prepare` wrapped, with both halves of a step; a `FusedSAM` itself is returned as
    it is.

    Make the first half with it, `sam_of(optimizer).first_step(zero_grad=True)`, and the second with the prepared
    `optimizer.step()`, which goes through Accelerate's GradScaler where there is one. Raises TypeError for an optimizer
    without a FusedSAM in it.
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
