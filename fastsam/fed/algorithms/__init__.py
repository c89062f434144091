"""Federated algorithms, one file per paper. `registry` holds the built-in ones by lower-case name."""

from __future__ import annotations

from .base import Algorithm, Direction, LocalStep, Round, RowEnd, State, Sums, Upload, moved
from .fedavg import FedAvg
from .fedsam import FedSAM
from .mofedsam import MoFedSAM

registry: dict[str, type[Algorithm]] = {
    made.__name__.lower().replace("_", "-"): made for made in (FedAvg, FedSAM, MoFedSAM)
}

__all__ = [
    "Algorithm",
    "Direction",
    "FedAvg",
    "FedSAM",
    "LocalStep",
    "MoFedSAM",
    "Round",
    "RowEnd",
    "State",
    "Sums",
    "Upload",
    "moved",
    "registry",
]
