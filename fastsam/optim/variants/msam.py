"""MSAM: Becker, Altrock and Risse, "Momentum-SAM: Sharpness Aware Minimization without Computational Overhead", arXiv
2401.12033, 2024 (the algorithm for SGD)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fastsam.optim.variants.sam import SAM, Ahead, check_one_pass


@dataclass(frozen=True)
class MSAM(SAM):
    """SAM in one pass: the weights rest at a point that is perturbed against the momentum, and the gradient is taken
    there.

        g = gradient at w~
        v, w <- the base optimizer's update of w with g (SGD: v <- mu*v + g, w <- w - lr*v)
        w~ <- w - rho * v/(||v|| + 1e-12),   w~ = w before the first step

    v is the base optimizer's own: `momentum_buffer` of SGD and RMSprop, which need a momentum, `exp_avg` of Adam, AdamW
    and Lion. The equations are the paper's for SGD; a weight decay is in v where torch puts it there (SGD's). With the
    other bases they are the same with their first moment (the paper has such a form for AdamW, which we did not
    compare). With `adaptive` v is scaled as ASAM scales g1. Radii are larger than SAM's. One gradient pass a step;
    state: a copy of the weights. Bytes per float32 parameter with SGD: 36 with the compiled kernels (20 of SGD, 4 for
    the norm, 12 for the next point; a kernel that summed the norm in the update would take 32), 40 with others. Raises
    ValueError for `interval` and `rho_fn`, which it has no use for.
    """

    ahead: ClassVar[Ahead] = Ahead.MOMENTUM

    rho: float | Tensor = 0.3

    def __post_init__(self) -> None:
        super().__post_init__()
        check_one_pass(self)
