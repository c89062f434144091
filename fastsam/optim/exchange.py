"""What the owner of parameters of full precision allows: for a while they have the memory of their perturbed weights, so that none is copied."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

# Elements per tensor, on average, from which the bytes that are saved (4 of 40 per float32 element) are worth more than the exchange (0.45 us of the
# interpreter per tensor). Measured on a CPU, docs/kernels.md: even at 16,384 with one thread, at 40,000 with two, which share the bytes alone.
WORTH = 65_536

_data_ptr = torch.Tensor.data_ptr


def pays(params: Sequence[Tensor]) -> bool:
    """Whether to exchange the memory of these parameters: a rule on sizes alone, so that the same model always takes the same way."""
    return sum(p.numel() for p in params) >= WORTH * len(params)


class Exchange:
    """Parameters, aliases of their own memory, and the buffers of their perturbed weights."""

    def __init__(self, params: Sequence[Tensor], own: Sequence[Tensor], apart: Sequence[Tensor]) -> None:
        self._params, self._own, self._apart = params, own, apart
        self._apart_at = list(map(_data_ptr, apart))

    def leave(self) -> None:
        """Gives the parameters the memory of their perturbed weights."""
        for p, apart in zip(self._params, self._apart, strict=True):
            p.data = apart

    def come_home(self) -> None:
        """Gives parameters their own memory back, but for those that somebody moved elsewhere, and those that never left."""
        now = list(map(_data_ptr, self._params))
        for p, own, apart_at, at in zip(self._params, self._own, self._apart_at, now, strict=True):
            if at == apart_at:
                p.data = own
        torch._C._increment_version(self._own)  # a graph that saved the perturbed weights then raises
