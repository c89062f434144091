"""A client's own model that learns from a mixture of itself and the model that is shared (APFL)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fastsam.fed.common.checks import number


@dataclass(frozen=True)
class Mixture:
    """A step of a second model v next to every local step of w, on the same batch and from the state before both.

        v <- v - lr * (alpha*g + weight_decay*v),                g the gradient at alpha*v + (1 - alpha)*w
        alpha <- min(max(alpha - rate*<v - w, g>, 0), 1)         in the first step of a round

    Args:
        alpha: float64 `[n]`, one for each client.
        rate: learning rate of alpha; 0 keeps it.

    Raises:
        ValueError: alpha is not such a vector, or the rate is negative.
    """

    alpha: Tensor
    rate: float = 0.0

    def __post_init__(self) -> None:
        number("rate", self.rate, at_least=0)
        if not isinstance(self.alpha, Tensor) or self.alpha.dim() != 1 or not self.alpha.is_floating_point():
            got = f"{self.alpha.dtype} {list(self.alpha.shape)}" if isinstance(self.alpha, Tensor) else repr(self.alpha)
            raise ValueError(f"Mixture: alpha must be a tensor of one number for each client, float64 [n], got {got}")
