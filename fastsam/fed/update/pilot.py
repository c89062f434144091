"""Gradients that a client takes before its first local step, to find the radius of its perturbations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from fastsam.fed.common.checks import integer

Radius = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Pilot:
    """The radius of a client's perturbations in a round, computed from gradients at its start.

    Args:
        batches: number of first batches of the local steps whose gradients are taken, in evaluation mode.
        radius: function of the means over these batches for n clients: of the gradients' norms, float64 `[n]`, and of
            the gradients, `[n, row_size]`. It returns the radii `[n]`, each from its own row and not negative.

    Raises:
        ValueError: batches is below 1, or radius is not callable.
    """

    batches: int
    radius: Radius

    def __post_init__(self) -> None:
        integer("batches", self.batches, at_least=1)
        if not callable(self.radius):
            raise ValueError(f"Pilot: radius must be a function of norms and gradients, got {self.radius!r}")

    def radii(self, norms: Tensor, gradients: Tensor) -> Tensor:
        """Return the radii `[n]`. Raises ValueError if the function returns another shape."""
        radii = self.radius(norms, gradients)
        if not isinstance(radii, Tensor) or radii.shape != norms.shape:
            shape = list(radii.shape) if isinstance(radii, Tensor) else type(radii).__name__
            raise ValueError(
                f"Pilot: radius must return a tensor with a number for each client, {list(norms.shape)}, got {shape}"
            )
        return radii
