"""Gaussian noise as a function of its purpose, so that a resumed run has the same noise as an uninterrupted one.

It is for simulation: with the seed the noise can be removed again. A deployment draws noise from a secret source and in
integers, because the low bits of floating-point noise reveal something of the sum (Mironov, "On Significance of the
Least Significant Bits for Differential Privacy", CCS 2012).
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fastsam.fed.common import seeds


class _Drawer(threading.local):
    """A generator for each thread, which is given its key anew for every draw: to make one costs as much as a thousand
    numbers."""

    def __init__(self) -> None:
        self._bits = np.random.Philox(0)
        self._generator = np.random.Generator(self._bits)
        self._state: Any = self._bits.state | {"buffer_pos": 4, "has_uint32": 0}  # with nothing left over

    def normals(self, n: int, key: int) -> np.ndarray:
        self._state["state"] = {"counter": _START, "key": np.array([key, 0], np.uint64)}
        self._bits.state = self._state
        return self._generator.standard_normal(n)


_START = np.zeros(4, np.uint64)
_drawer = _Drawer()


def normals(n: int, *parts: int | str) -> Tensor:
    """Return n standard normal numbers, float64 `[n]` on the CPU.

    They are the numbers of a counter-based generator (Philox) from counter 0. Its key is made of `parts`.
    """
    return torch.from_numpy(_drawer.normals(n, seeds.derive(*parts)))
