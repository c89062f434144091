"""fastsam: fused Sharpness-Aware Minimization for PyTorch, and a thin federated loop (`fastsam.fed`) on the same kernels."""

from __future__ import annotations

from .backends import backend
from .batchnorm import frozen_batchnorm_stats
from .optim import FusedSAM

__version__ = "0.1.0"
__all__ = ["FusedSAM", "backend", "frozen_batchnorm_stats"]
