"""ESAM's stochastic weight perturbation: Du, Yan, Feng, Zhou, Zhen, Goh and Tan, "Efficient Sharpness-aware
Minimization for Improved Training of Neural Networks", ICLR 2022."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fastsam.optim.variants.sam import SAM, Places, check_real, check_seed, seeded


@dataclass(frozen=True)
class ESAM(SAM):
    """SAM that perturbs a random part of the weights, another in every step, and these by so much more that the mean is
    SAM's perturbation.

        m ~ Bernoulli(beta), element by element
        eps = rho/beta * m*g1/(||g1|| + 1e-12),   the norm that of all of g1
        w <- the base optimizer's update with g2 = gradient at w + eps

    beta = 1 is SAM. The paper's other half, which takes the second gradient of the samples whose loss rises most, is
    left to the loop that makes it. The masks are a function of `seed` and of the number of the step, the same on all
    ranks; on another device they are others. Here nothing is saved by what is not perturbed: two gradient passes a
    step; state: between them a copy of the weights, and the masked gradient and its mask. Bytes per float32 parameter
    beyond SAM's 40: 24 (torch's calls). Not for steps that torch.compile traces, which knows no generators. Raises
    ValueError for a beta outside (0, 1], TypeError for a seed that is no integer.
    """

    masks: ClassVar[bool] = True

    beta: float = 0.6
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_real("beta", self.beta)
        if not 0 < self.beta <= 1:
            raise ValueError(f"beta must be above 0 and 1 or less, got {self.beta!r}")
        check_seed(self.seed)

    def mask(self, g: Tensor, memory: Tensor | None, out: Tensor, step: int, places: Places) -> None:
        generator = seeded(self.seed, step, g.device)
        for part in places.views(out):
            part.bernoulli_(self.beta, generator=generator)
        out.div_(self.beta)
