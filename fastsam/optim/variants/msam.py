"""MSAM: Becker, Altrock and Risse, "Momentum-SAM: Sharpness Aware Minimization without Computational Overhead", arXiv
2401.12033, 2024 (the algorithm for SGD)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fastsam.optim.variants.sam import SAM, OnePassDirection, check_one_pass


@dataclass(frozen=True)
class MSAM(SAM):
    """SAM in one pass: the weights stay at a point that is perturbed against the momentum, and the gradient is computed
    there.

        g = gradient at w~
        v, w <- the base optimizer's update of w with g (SGD: v <- mu*v + g, w <- w - lr*v)
        w~ <- w - rho * v/(||v|| + 1e-12),   w~ = w before the first step

    v is the base optimizer's momentum: `momentum_buffer` of SGD and RMSprop, which need a momentum, `exp_avg` of Adam,
    AdamW and Lion. The equations are the paper's for SGD, and include weight decay in v if torch does (SGD). With other
    bases they are the same with the base's first moment. The paper has such a form for AdamW, which was not compared.
    With `adaptive` v is scaled as ASAM scales g1. Radii are larger than SAM's. One gradient pass a step; state: a copy
    of the weights. Bytes per float32 parameter with SGD: 36 with the compiled kernels (20 of SGD, 4 for the norm, 12
    for the next point), 40 with others. A kernel that summed the norm in the update would take 32. Raises ValueError
    for `interval` and `rho_fn`, which it cannot use.
    """

    one_pass_direction: ClassVar[OnePassDirection] = OnePassDirection.MOMENTUM

    rho: float | Tensor = 0.3

    def __post_init__(self) -> None:
        super().__post_init__()
        check_one_pass(self)
