"""The steps of a variant whose first gradient is of weights that are drawn at random (bSAM): the draw, and a
perturbation without a norm."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from fastsam.optim.bucket import FIRST
from fastsam.optim.buffers import Phase
from fastsam.optim.engine import Engine
from fastsam.optim.mixing import Call, Scales
from fastsam.optim.variants.bsam import BSAM
from fastsam.optim.variants.sam import SAM, seeded
from fastsam_kernels.columns import Column

SCALE, MOVE = "scale", "move"  # fields: what the rule keeps, and what the weights move by

SCALED = (
    "a GradScaler with BSAM, whose perturbation and scale need the gradients themselves, not multiplied with anything: "
    "train in bfloat16, which "
    "needs no scaler, with check_finite=True for steps that are not finite"
)


class Sampled(Engine):
    """SAMPLED is the phase at the drawn weights, for the first pass. From there on the originals are saved, so that
    every move starts at them, and an interrupt, wherever it falls, goes back to them."""

    variant: BSAM

    def __init__(
        self,
        base: Optimizer,
        backend: str,
        stochastic_rounding: bool,
        exclusive: bool,
        variant: SAM,
        compact: torch.dtype | None = None,
    ) -> None:
        options = {"stochastic_rounding": stochastic_rounding, "exclusive": exclusive}
        for name in (name for name, given in options.items() if given):
            raise ValueError(
                f"{name}=True with {type(variant).__name__}, which moves the weights twice in a step; leave it out"
            )
        super().__init__(base, backend, variant=variant, compact=compact)
        self.always = self.plain = False  # steps are counted, because what is drawn depends on their number

    @torch.no_grad()
    def sample_(self) -> None:
        """To weights drawn around the own ones, of all parameters that need a gradient. Raises before anything is
        written."""
        self._follow()
        self._refresh_options(self.base.param_groups)
        if self._scalars.adaptive:
            raise ValueError(
                "adaptive=True in a parameter group with BSAM, whose perturbation rho*g1/s scales nothing else"
            )
        for update in self._updates:
            update.adopt(self._scalars.kinds, self.base.state)  # s may be a tensor that somebody put there
        calls: list[Call] = []
        # One generator for all: buckets of other dtypes are not to get the same numbers.
        generator = seeded(self.variant.seed, self.steps, self.buckets[0].device) if self.buckets else None
        for bucket in self.buckets:
            part = bucket.select(tuple(i for i, p in enumerate(bucket.params) if p.requires_grad))
            drawn = bucket.views(bucket.field(MOVE), part)
            for z, s in zip(drawn, bucket.views(bucket.field(SCALE), part), strict=True):
                # In float32 for every dtype, so that the same numbers are drawn.
                standard = torch.randn(z.shape, generator=generator, device=z.device, dtype=torch.float32)
                torch.mul(standard, s.mul(self.variant.samples).rsqrt_(), out=z)
            calls.append((bucket, part, bucket._rounded(bucket.field(MOVE), part)))
        self._save_(calls)
        self._go_(calls, _identity(self._scalars.tensor), None)
        self.phase = Phase.SAMPLED

    @torch.no_grad()
    def perturb_(self, scale: Tensor | None = None, lent: bool = False) -> None:
        """From the gradients at the drawn weights to `w + rho*g1/s`; nowhere where one of them is not finite."""
        calls = self.look()
        self._norm_(calls)
        for bucket, part, grads in calls:
            kept, move = bucket.field(FIRST), bucket.field(MOVE)
            if part is not bucket.whole:
                kept.zero_()
            first = bucket.views(kept, part)
            if grads:
                torch._foreach_copy_(first, list(grads))
            for d, g, s in zip(bucket.views(move, part), first, bucket.views(bucket.field(SCALE), part), strict=True):
                torch.div(g, s, out=d)
        moves = [(bucket, part, bucket._rounded(bucket.field(MOVE), part)) for bucket, part, _ in calls]
        if any(part is not bucket.held for bucket, part, _ in moves):
            self.recover_()
            self._save_(moves)
        self._go_(moves, self._scalars.tensor, self._sum)
        self.phase = Phase.PERTURBED

    def _save_(self, calls: Sequence[Call]) -> None:
        """Saves the weights of these parameters, where they stay."""
        for bucket, part, moves in calls:
            bucket.begin()
            bucket.save_(part, moves)
        for bucket, part, _ in calls:
            bucket.held = part
        self.phase = Phase.PERTURBED

    def _go_(self, calls: Sequence[Call], hyper: Tensor, sumsq: Tensor | None) -> None:
        """From the saved weights by these vectors times rho; not where sumsq is not finite."""
        # A norm of 1, by which the kernels divide.
        one = torch.ones(1, dtype=torch.float64, device=self._sum.device)
        norm = one if sumsq is None else torch.where(sumsq.isfinite(), one, sumsq)
        for bucket, part, moves in calls:
            part.load()
            bucket.kernels.perturb_(part.z, bucket.origin, moves, part.table, hyper, norm, False, None)
            part.store()
        self._written()

    def update_(self, calls: Sequence[Call], scales: Scales, found_inf: Tensor | None, check_finite: bool) -> None:
        """As every step's, from g1 beside g2; none where g1 is not finite."""
        if found_inf is not None:
            raise RuntimeError(SCALED)
        super().update_(calls, scales, (~self._sum.isfinite()).to(torch.float32), check_finite)


def _identity(hyper: Tensor) -> Tensor:
    """Numbers with which a perturbation is its vector."""
    found = torch.zeros_like(hyper)
    found[:, :, Column.RHO] = 1.0
    return found
