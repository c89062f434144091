"""Who is compared: SGD, and every variant of `fastsam.variants`; and the grid of each, of the same number of trials."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from fastsam import SAM, FusedSAM, variants

MOMENTUM, WEIGHT_DECAY = 0.9, 5e-4
DECAYS = (0.0, 5e-4, 5e-3)
RHOS = (0.02, 0.05, 0.15)


@dataclass(frozen=True)
class Contender:
    """`make`: a variant from the second number of a trial (the radius, or what `second` says); None for SGD, whose
    second is the weight decay.

    share: of a task's steps.
    """

    make: Callable[[float], SAM] | None
    values: tuple[float, ...] = RHOS
    second: str = "rho"
    share: float = 1.0

    def optimizer(self, model: nn.Module, lr: float, value: float) -> torch.optim.Optimizer:
        """For a trial. Raises what the variant raises that cannot serve here."""
        if self.make is None:
            params = list(model.parameters())
            return torch.optim.SGD(params, lr=lr, momentum=MOMENTUM, weight_decay=value, fused=True)
        sam = self.make(value)
        groups = variants.SAMON.groups(model) if isinstance(sam, variants.SAMON) else model.parameters()
        return FusedSAM(groups, torch.optim.SGD, variant=sam, lr=lr, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY)


NAMED = {
    "SGD": Contender(None, DECAYS, "weight decay"),
    "SGD, half the steps": Contender(None, DECAYS, "weight decay", share=0.5),  # what stopping early does, alone
    "SAM": Contender(lambda rho: SAM(rho)),
    "ASAM": Contender(lambda rho: SAM(rho, adaptive=True), (0.2, 0.5, 1.0)),
    "SAM, interval=5": Contender(lambda rho: SAM(rho, interval=5)),
    "LESAM": Contender(lambda sigma: SAM(0.15, rho_fn=variants.LESAM(sigma)), (0.01, 0.03, 0.1), "sigma"),
    "WSAM": Contender(lambda rho: variants.WSAM(rho), (0.005, 0.015, 0.05)),
    "LookSAM": Contender(lambda rho: variants.LookSAM(rho, k=5)),
    "SAMON": Contender(lambda rho: variants.SAMON(rho), (0.1, 0.5, 2.0)),
    "MSAM": Contender(lambda rho: variants.MSAM(rho), (0.05, 0.15, 0.5)),
}


def _by_default(kind: type[SAM]) -> Contender:
    return Contender(lambda rho: kind(rho))


def contenders() -> dict[str, Contender]:
    """By name, SGD first: those above, and every other variant with its own defaults and SAM's radii."""
    found = dict(NAMED)
    for name in variants.__all__:
        kind = getattr(variants, name)
        if name not in found and isinstance(kind, type) and issubclass(kind, SAM):
            found[name] = _by_default(kind)
    return found
