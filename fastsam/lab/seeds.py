"""The spread of one number over several seeds."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def deviation(values: Sequence[float] | Sequence[Sequence[float]] | np.ndarray) -> np.ndarray:
    """Return the sample's standard deviation (n - 1) over the first axis, the seeds. Zero for one seed.

    The seeds are a sample of all seeds.
    """
    found = np.asarray(values, dtype=np.float64)
    return found.std(axis=0, ddof=1) if len(found) > 1 else np.zeros(found.shape[1:])
