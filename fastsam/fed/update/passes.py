"""Forward and backward passes of n clients, requested by a local step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from fastsam.fed.update.gradients import Gradients

Objective = Callable[..., Tensor]  # function of a client's loss, outputs, labels and operands
ONLY_IN_BEGIN = "passes.first() and passes.all() are for begin(); a step has passes()"
ONLY_IN_STEP = "passes() and passes.outputs_of() are for a step; begin() has passes.first() and passes.all()"


class Passes(Protocol):
    """Forward and backward passes of n clients, which a step may request. A subclass has the half for `begin`, the half
    for a step, or both."""

    def __call__(self, objective: Objective | None = None, *operands: Tensor) -> tuple[Tensor, Gradients]:
        """Return the losses `[n]` and the gradients of the step's batches at `rows.z`.

        All passes of a step draw the same random numbers (dropout). The first pass of a step updates the model's
        buffers; later passes, and passes of `begin`, leave them.

        Args:
            objective: function `objective(loss, outputs, y, *operands)` of one client, with that client's part of each
                operand, whose gradient takes the place of the loss's. The losses are of the data in any case.
            *operands: tensors `[n, ...]`.
        """
        raise ValueError(ONLY_IN_STEP)

    def first(self, batches: int) -> tuple[Tensor, Tensor]:
        """Return, in `begin`, the mean gradient `[n, row_size]` over each client's first batches, in evaluation mode,
        and the mean of its norms, float64 `[n, 1]`."""
        raise ValueError(ONLY_IN_BEGIN)

    def all(self) -> Tensor:
        """Return, in `begin`, the mean gradient `[n, row_size]` over all samples of each client, in evaluation mode."""
        raise ValueError(ONLY_IN_BEGIN)

    def outputs_of(self, w: Tensor) -> Tensor:
        """Return the outputs `[n, ...]` on the step's batches of a teacher with the weights `w` `[n, row_size]`, in
        evaluation mode and without a gradient."""
        raise ValueError(ONLY_IN_STEP)
