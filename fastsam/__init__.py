"""fastsam: fused Sharpness-Aware Minimization for PyTorch, and a thin federated loop (`fastsam.fed`) on the same
kernels."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fastsam.backends import backend
    from fastsam.batchnorm import frozen_batchnorm_stats
    from fastsam.optim import FusedSAM, Lion, variants
    from fastsam.optim.variants import GSAM, MSAM, SAM

__version__ = "0.1.0.dev0"
__all__ = ["GSAM", "MSAM", "SAM", "FusedSAM", "Lion", "backend", "frozen_batchnorm_stats", "variants"]

# Imported at first use, so that `fastsam info` works, and names what is missing, even if torch is not installed.
_HOMES = {
    "FusedSAM": ".optim",
    "GSAM": ".optim.variants",
    "Lion": ".optim",
    "MSAM": ".optim.variants",
    "SAM": ".optim.variants",
    "backend": ".backends",
    "frozen_batchnorm_stats": ".batchnorm",
    "variants": ".optim",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name], __name__), name)
    if name == "fed":
        return importlib.import_module(".fed", __name__)
    raise AttributeError(f"module 'fastsam' has no attribute {name!r}; it has {', '.join(__all__)} and fed")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__, "fed"])
