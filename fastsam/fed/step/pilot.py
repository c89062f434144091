"""Gradients that a client takes before its first local step, to find the radius of its perturbations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from fastsam.fed.common.checks import integer

Radius = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Pilot:
    """The radius of a client's perturbations in a round, made of gradients at its start.

    batches: of the first so many batches of its local steps (all of them where there are fewer) gradients are taken, in
    evaluation mode.
    radius: a function of the means over these batches, for n clients at once: of the gradients' norms, float64 `[n]`,
    and of the gradients themselves, `[n, row_size]`. It returns the radii, `[n]`, each of its own row, none negative.
    Raises ValueError for batches below 1, and a radius that cannot be called.
    """

    batches: int
    radius: Radius

    def __post_init__(self) -> None:
        integer("batches", self.batches, at_least=1)
        if not callable(self.radius):
            raise ValueError(f"Pilot: radius must be a function of norms and gradients, got {self.radius!r}")

    def radii(self, norms: Tensor, gradients: Tensor) -> Tensor:
        """`[n]`. Raises ValueError for what the function returned in another shape."""
        made = self.radius(norms, gradients)
        if not isinstance(made, Tensor) or made.shape != norms.shape:
            got = list(made.shape) if isinstance(made, Tensor) else type(made).__name__
            raise ValueError(
                f"Pilot: radius must return a tensor with a number for each client, {list(norms.shape)}, got {got}"
            )
        return made
