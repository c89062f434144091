"""Lookbehind: Mordido, Malviya, Baratin and Chandar, "Lookbehind-SAM: k steps back, 1 step forward", ICML 2024
(Algorithm 1)."""

from __future__ import annotations

from dataclasses import dataclass

from fastsam.optim.variants.sam import SAM, check_interval, check_real
from fastsam.step import Mix


@dataclass(frozen=True)
class Lookbehind(SAM):
    """Climbs k times, each time along the gradient where it has come to, and descends by the gradients of all these
    points.

        w_0 = w
        w_j = w_{j-1} + rho * g_{j-1}/(||g_{j-1}|| + 1e-12),   g_j = gradient at w_j,   j = 1 ... k
        w <- the base optimizer's update with alpha * (g_1 + ... + g_k)

    k = 1 with alpha = 1 is SAM. In the paper each g_j makes a step of fast weights, from w on, and w goes the part
    alpha of the way to them. With SGD without momentum and weight decay this is the same; another base optimizer makes
    one step here and not k, so that a momentum takes in the sum once, a weight decay is applied once and in full, and
    Adam, which divides by the gradient's size, hardly sees alpha. The paper's alpha that adapts itself is left out.
    With `adaptive` each g is scaled by the weights that it is the gradient at; with a `radius` each has its own.

    By hand a step is k times a backward pass and `first_step()`, then a backward pass and `second_step()`. k + 1
    gradient passes a step; state between them: a copy of the weights, one of the point before, and the sum, in the
    gradients' dtype. A gradient at w_1 ... w_k with inf or NaN updates nothing. Bytes per float32 parameter beyond
    SAM's 40: 4 for the norm and 16 for the point, each further time; 8 to keep the first of the gradients, 12 to add
    each other; 8 to check and to read the sum: with k of 2 and more 32*k - 28. Raises TypeError and ValueError for a k
    that is no number of ascents, ValueError for an alpha outside (0, 1].
    """

    k: int = 2
    alpha: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        check_interval("k", self.k)
        check_real("alpha", self.alpha)
        if not 0 < self.alpha <= 1:
            raise ValueError(f"alpha must be above 0 and 1 or less, got {self.alpha!r}")

    @property
    def ascents(self) -> int:
        return self.k

    @property
    def mix(self) -> Mix:
        return Mix(a=self.alpha, b=self.alpha if self.k > 1 else 0.0)
