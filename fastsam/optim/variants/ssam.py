"""SSAM-F: Mi, Shen, Ren, Zhou, Sun, Ji and Tao, "Make Sharpness-Aware Minimization Stronger: A Sparsified Perturbation Approach", NeurIPS 2022
(with the mask of the Fisher information)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fastsam.optim.variants.sam import SAM, Memory, Places, check_interval, check_real


@dataclass(frozen=True)
class SSAMF(SAM):
    """SAM that perturbs only the weights to which the loss is most sensitive, by a mask that is renewed from time to time.

        in the first of every `interval` steps:  m <- 1 where g1^2 is among the (1 - sparsity)*n largest, else 0
        eps = rho * m*g1/(||g1|| + 1e-12),   the norm that of all of g1
        w <- the base optimizer's update with g2 = gradient at w + eps

    The paper's Fisher information is a mean of g^2 over samples, one by one; here it is g1^2 of the batch in whose step the mask is renewed, which
    takes no pass. n counts the parameters of one dtype. A first gradient with inf or NaN renews nothing: in the very first step nothing is then
    perturbed until the next renewal. Two gradient passes a step; state: m in the arithmetic's dtype, and between the passes its next value, the
    masked gradient and a copy of the weights. Bytes per float32 parameter beyond SAM's 40: 28 for the masked gradient, 20 to keep m (torch's calls;
    bits and a fused kernel would take a tenth).
    Raises ValueError for a sparsity outside [0, 1), TypeError and ValueError for an interval that is no number of steps.
    """

    memory: ClassVar[Memory] = Memory.MASK
    masks: ClassVar[bool] = True

    sparsity: float = 0.5
    interval: int = 100

    def __post_init__(self) -> None:
        super().__post_init__()
        check_interval("interval", self.interval)
        check_real("sparsity", self.sparsity)
        if not 0 <= self.sparsity < 1:
            raise ValueError(f"sparsity must be 0 or more and below 1, got {self.sparsity!r}")

    def mask(self, g: Tensor, memory: Tensor | None, out: Tensor, step: int, places: Places) -> None:
        assert memory is not None
        # `every` leaves out steps, of which none is to be one that renews.
        if step // self.every % self.interval:
            out.copy_(memory)
        else:
            largest = g.abs().topk(round((1 - self.sparsity) * places.size), sorted=False).indices
            out.zero_().scatter_(1, largest, 1.0)
