"""SSAM-F and SSAM-D: Mi, Shen, Ren, Zhou, Sun, Ji and Tao, "Make Sharpness-Aware Minimization Stronger: A Sparsified
Perturbation Approach", NeurIPS 2022 (with the mask of the Fisher information, and with one that is trained
dynamically)."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import cos, pi
from typing import ClassVar

import torch
from torch import Tensor

from fastsam.optim.variants.sam import SAM, Memory, Places, check_interval, check_real, check_seed, seeded


def _check_sparsity(sparsity: float) -> None:
    check_real("sparsity", sparsity)
    if not 0 <= sparsity < 1:
        raise ValueError(f"sparsity must be 0 or more and below 1, got {sparsity!r}")


@dataclass(frozen=True)
class SSAMF(SAM):
    """SAM that perturbs only the weights to which the loss is most sensitive, by a mask that is renewed from time to
    time.

        in the first of every `interval` steps:  m <- 1 where g1^2 is among the (1 - sparsity)*n largest, else 0
        eps = rho * m*g1/(||g1|| + 1e-12),   the norm that of all of g1
        w <- the base optimizer's update with g2 = gradient at w + eps

    The paper's Fisher information is a mean of g^2 over samples, one by one; here it is g1^2 of the batch in whose step
    the mask is renewed, which takes no pass. n counts the parameters of one dtype. A first gradient with inf or NaN
    renews nothing: in the very first step nothing is then perturbed until the next renewal. Two gradient passes a step;
    state: m in the arithmetic's dtype, and between the passes its next value, the masked gradient and a copy of the
    weights. Bytes per float32 parameter beyond SAM's 40: 28 for the masked gradient, 20 to keep m (torch's calls; bits
    and a fused kernel would take a tenth). Raises ValueError for a sparsity outside [0, 1), TypeError and ValueError
    for an interval that is no number of steps.
    """

    memory: ClassVar[Memory] = Memory.MASK
    masks: ClassVar[bool] = True

    sparsity: float = 0.5
    interval: int = 100

    def __post_init__(self) -> None:
        super().__post_init__()
        check_interval("interval", self.interval)
        _check_sparsity(self.sparsity)

    def mask(self, g: Tensor, memory: Tensor | None, out: Tensor, step: int, places: Places) -> None:
        assert memory is not None
        # `every` leaves out steps, of which none is to be one that renews.
        if step // self.every % self.interval:
            out.copy_(memory)
        else:
            largest = g.abs().topk(round((1 - self.sparsity) * places.size), sorted=False).indices
            out.zero_().scatter_(1, largest, 1.0)


@dataclass(frozen=True)
class SSAMD(SAM):
    """SAM that perturbs a part of the weights, which moves from time to time from where the gradient is small to where
    chance takes it.

        before the first step:  m <- a random mask of k = (1 - sparsity)*n ones
        in the first of every `interval` steps, t being its number:
            N = f(t)*k,  f(t) = drop/2 * (1 + cos(pi*t/horizon)),   at most n - k, and 0 from t = horizon on
            m <- 0 in the N of its ones where |g1| is smallest, and 1 in N of its zeros, drawn at random
        eps = rho * m*g1/(||g1|| + 1e-12),   the norm that of all of g1
        w <- the base optimizer's update with g2 = gradient at w + eps

    horizon: steps of the whole training, over which the exchange fades away; every one counts, those that do not
    perturb too. What is drawn is a function of `seed` and of the step's number, the same on all ranks and after a
    resume; on another device it is other. n counts the parameters of one dtype; those without a gradient have one of
    zeros. The first step draws the mask and exchanges nothing. A first gradient with inf or NaN renews nothing; in the
    very first step nothing is then perturbed until the next renewal, which draws the mask. Two gradient passes a step;
    state: m in the arithmetic's dtype, and between the passes its next value, the masked gradient and a copy of the
    weights. Bytes per float32 parameter beyond SAM's 40: 28 for the masked gradient, 20 to keep m (torch's calls). Not
    for steps that torch.compile traces, which knows no generators. Raises ValueError for a sparsity outside [0, 1) and
    a drop outside [0, 1], TypeError and ValueError for an interval and a horizon that are no number of steps, TypeError
    for a seed that is no integer.
    """

    memory: ClassVar[Memory] = Memory.MASK
    masks: ClassVar[bool] = True

    sparsity: float = 0.5
    interval: int = 100
    drop: float = 0.5
    seed: int = 0
    horizon: int = field(kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_interval("interval", self.interval)
        check_interval("horizon", self.horizon)
        _check_sparsity(self.sparsity)
        check_real("drop", self.drop)
        if not 0 <= self.drop <= 1:
            raise ValueError(f"drop must be 0 or more and 1 or less, got {self.drop!r}")
        check_seed(self.seed)

    def mask(self, g: Tensor, memory: Tensor | None, out: Tensor, step: int, places: Places) -> None:
        assert memory is not None
        if step // self.every % self.interval:
            out.copy_(memory)
            return
        ones = round((1 - self.sparsity) * places.size)
        share = self.drop / 2 * (1 + cos(pi * min(step, self.horizon) / self.horizon))
        exchanged = min(round(share * ones), places.size - ones)
        # Above 0 but in the gaps between parameters, which are never drawn. In float32 for every dtype, so that the
        # same ones are.
        drawn, generator = out.zero_(), seeded(self.seed, step, g.device)
        for part in places.views(drawn):
            part.copy_(1 - torch.rand(part.shape, generator=generator, device=g.device, dtype=torch.float32))
        inside = memory > 0
        # A mask without ones is the one of before the first step: then both halves of the new one are drawn, the
        # smallest numbers and the largest.
        stays = torch.where(inside, g.abs(), -drawn).masked_fill_(drawn == 0, -2.0)
        kept = stays.topk(ones - exchanged, sorted=False).indices
        grown = drawn.masked_fill(inside, 0.0).topk(exchanged, sorted=False).indices
        out.zero_().scatter_(1, kept, 1.0).scatter_(1, grown, 1.0)
