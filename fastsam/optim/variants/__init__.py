"""The SAM family, a file for each variant: values of `FusedSAM(..., variant=...)`."""

from __future__ import annotations

from fastsam.optim.variants.friendly import FriendlySAM
from fastsam.optim.variants.gradient_penalty import GradientPenalty
from fastsam.optim.variants.gsam import GSAM
from fastsam.optim.variants.last_gradient import LastGradient
from fastsam.optim.variants.lesam import LESAM
from fastsam.optim.variants.linf import LInfSAM
from fastsam.optim.variants.looksam import LookSAM
from fastsam.optim.variants.msam import MSAM
from fastsam.optim.variants.preconditioned import PreconditionedSAM
from fastsam.optim.variants.sam import SAM
from fastsam.optim.variants.samon import SAMON
from fastsam.optim.variants.vasso import VaSSO
from fastsam.optim.variants.wsam import WSAM

__all__ = [
    "GSAM",
    "LESAM",
    "MSAM",
    "SAM",
    "SAMON",
    "WSAM",
    "FriendlySAM",
    "GradientPenalty",
    "LInfSAM",
    "LastGradient",
    "LookSAM",
    "PreconditionedSAM",
    "VaSSO",
]
