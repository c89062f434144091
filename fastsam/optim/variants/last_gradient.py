"""SAM along the last gradient: the perturbation of AsyncSAM (Jo, Lim and Lee, "Asynchronous Sharpness-Aware
Minimization for Fast and Accurate Deep Learning", arXiv 2503.11147, 2025) with a staleness of one step, in one process
and without its second gradient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fastsam.optim.variants.sam import SAM, OnePassDirection, check_one_pass


@dataclass(frozen=True)
class LastGradient(SAM):
    """SAM in one pass: the weights stay at a point that is perturbed along the gradient of the step before, and the
    gradient is computed there.

        g = gradient at w~
        w <- the base optimizer's update of w with g
        w~ <- w + rho * g/(||g|| + 1e-12),   w~ = w before the first step

    AsyncSAM computes the gradient of the step before at w, in a pass on another device. This variant uses the gradient
    of that step's update, at w~, which costs no pass. A gradient that made no update (a GradScaler's inf) is not used.
    With `adaptive` g is scaled as ASAM scales g1. One gradient pass a step; state: a copy of the weights, and g in its
    dtype. Bytes per float32 parameter with SGD and momentum: 44 with the compiled kernels (20 of SGD, 8 to keep g, 4
    for the norm, 12 for the next point), 48 with others. Raises ValueError for `interval` and `rho_fn`, which it cannot
    use.
    """

    one_pass_direction: ClassVar[OnePassDirection] = OnePassDirection.GRADIENT

    def __post_init__(self) -> None:
        super().__post_init__()
        check_one_pass(self)
