"""Random orders of many clients' samples in one native call, on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from fastsam_kernels import native

Orders = Callable[[Tensor, Tensor, int | None], None]


@cache
def native_orders() -> Orders | None:
    """Return the function `f(out, clients, key)`, or None if the compiled library of the CPU is missing.

    It writes a random order of each client into `out`, int64 `[.]`: words of Philox4x32-7 with the counters (block of
    four words, number of the client, 0, 0), sorted; equal words keep their order. Without a key it writes the stored
    order. `clients` is int64 `[n, 5]`: number of the client, number of its samples, how many of the order are kept,
    the place of the first in `out`, and the index of the client's first sample, which is added.
    """
    if native.why_not("cpu") is not None:
        return None
    orders: Orders = torch.ops.fastsam.orders_.default
    return orders
