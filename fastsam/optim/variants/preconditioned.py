"""Preconditioned SAM: Singh, Mobahi, Agarwala and Dauphin, "Avoiding Spurious Sharpness Minimization Broadens
Applicability of SAM", ICML 2025."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fastsam.optim.variants.sam import SAM, VariantState, check_real


@dataclass(frozen=True)
class PreconditionedSAM(SAM):
    """SAM for Adam and AdamW that perturbs along their preconditioned gradient.

        d = g1 / (sqrt(v) + eps),   v = Adam's second moment (`exp_avg_sq`) after the step before;  d = g1 where v = 0
        e = rho * d/(||d|| + 1e-12)
        w <- the base optimizer's update with g2 = gradient at w + e

    Plain SAM often harms language models, and the paper finds that a preconditioned perturbation helps them. Adam's
    correction of the bias of v would only scale d, so it is left out. The first step is SAM's, because v is 0. With
    `adaptive` d is scaled as ASAM scales g1. Two gradient passes a step; state: a copy of the weights between them.
    Bytes per float32 parameter: 48 of SAM with AdamW, and 50 to make the direction (torch's calls; a fused kernel would
    take 4). Raises ValueError if eps is not above 0 and finite, and for a base optimizer other than `torch.optim.Adam`
    and `AdamW` without amsgrad.
    """

    state: ClassVar[VariantState] = VariantState.NONE
    base_state: ClassVar[str | None] = "exp_avg_sq"

    eps: float = 1e-8

    def __post_init__(self) -> None:
        super().__post_init__()
        check_real("eps", self.eps, "above 0 and finite", lambda v: 0 < v < math.inf)

    def direction(self, g: Tensor, state: Tensor, next_state: Tensor) -> Tensor:
        root = state.sqrt().add_(self.eps)
        return g.div_(root.masked_fill_(state == 0, 1.0))
