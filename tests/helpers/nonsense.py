"""Values that no caller thinks of, for whatever takes one."""

from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from torch import nn


class Hostile:
    """An object whose conversions raise unexpected errors."""

    def __float__(self) -> float:
        raise ZeroDivisionError("no")

    def __index__(self) -> int:
        raise KeyError("no")

    def __repr__(self) -> str:
        return "Hostile()"


NONSENSE: list[Any] = [
    None, ..., True, -1, 0, 10**400, -(10**400), 2**63, 1e308, -0.0, float("nan"), float("inf"), 1j, "", "x", "auto",
    b"auto", "\0", [], [1],
    (), {}, {"a": 1}, set(), object(), Hostile(), int, len, lambda *a: a, torch.ones(3), torch.ones(1),
    torch.tensor(1j),
    torch.ones(2, device="meta"), np.float64("nan"), np.ones(2), np.array("x"), Fraction(10**400), Decimal("NaN"),
    Decimal("1e400"),
    nn.Linear(1, 1), range(3),
]  # fmt: skip
