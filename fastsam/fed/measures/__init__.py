"""Measures of a run in addition to accuracy: sharpness, drifts, the loss surface, and the quantities of the papers'
theorems.

The functions take flat weights and an `Objective`, the loss over fixed data. `fed.run(measures=[...])` calls them in
its rounds.
"""

from __future__ import annotations

from fastsam.fed.measures.hook import make
from fastsam.fed.measures.objective import Objective, subset, unit
from fastsam.fed.measures.options import NAMES, Measures, NamedMeasures, measures_by_name

__all__ = ["NAMES", "Measures", "NamedMeasures", "Objective", "make", "measures_by_name", "subset", "unit"]
