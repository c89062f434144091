"""Gaussian noise as a function of what it is for, so that a resumed run has the noise that a whole one would have had.

For simulation: who knows the seed can take the noise out again. A deployment draws it from a secret source, and in integers (floating-point
noise has low bits that tell of the sum: Mironov, "On Significance of the Least Significant Bits for Differential Privacy", CCS 2012).
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from fastsam.fed.common import seeds


def normals(n: int, *parts: int | str) -> Tensor:
    """n standard normal numbers, float64 `[n]` on the CPU: those of a counter-based generator (Philox), whose key is made of `parts`."""
    made = np.random.Generator(np.random.Philox(key=seeds.derive(*parts)))
    return torch.from_numpy(made.standard_normal(n))
