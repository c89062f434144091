"""What is measured of a run besides accuracy: sharpness, drifts, the loss surface, and the quantities of the papers' theorems.

The functions take flat weights and an `Objective`, the loss over fixed data; `fed.run(measures=[...])` takes them in its rounds.
"""

from __future__ import annotations

from .base import Measures
from .hook import make
from .objective import Objective, subset, unit
from .options import NAMES, Options, check

__all__ = ["NAMES", "Measures", "Objective", "Options", "check", "make", "subset", "unit"]
