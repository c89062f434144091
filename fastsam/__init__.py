"""fastsam: fused Sharpness-Aware Minimization for PyTorch, and a thin federated loop on the same kernels."""

from __future__ import annotations

from .backends import backend

__version__ = "0.1.0"
__all__ = ["backend"]
