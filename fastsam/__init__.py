"""fastsam: fused Sharpness-Aware Minimization for PyTorch, and a thin federated loop on the same kernels.

    opt = fastsam.FusedSAM(model.parameters(), torch.optim.SGD, rho=0.05, lr=0.1, momentum=0.9)

`fastsam.fed` is the federated loop; `from fastsam import fed` loads it.
"""

from __future__ import annotations

from .backends import backend
from .batchnorm import frozen_batchnorm_stats
from .optim import FusedSAM

__version__ = "0.1.0"
__all__ = ["FusedSAM", "backend", "frozen_batchnorm_stats"]
