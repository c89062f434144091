"""Products of stacked clients' small matrices, on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from fastsam_kernels import native

Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]

# Multiplications of a call from which it is worth its while, and of a matrix up to which it was measured (see
# docs/kernels.md).
_FEWEST, _MOST = 2**16, 2**21


def product_of(a: Tensor, b: Tensor) -> Product | None:
    """`f(a, b, bias)` for matrices like these, where there is one that is faster than torch's: `a @ b`, plus `bias` if
    that is not None.

    a, b: `[rows, m, k]` and `[rows, k, n]` in any strides; bias: `[rows, m, n]`, or broadcast to it. An element is the
    sum of its products in the order of k, the bias added last: the same bits with any other rows beside it, and in any
    order of memory.
    """
    if a.device.type != "cpu" or a.dtype != torch.float32 or b.dtype != a.dtype or not a.dim() == b.dim() == 3:
        return None
    (rows, m, k), n = a.shape, b.shape[2]
    if not _FEWEST <= rows * m * k * n <= rows * _MOST or native.why_not("cpu") is not None:
        return None
    return _product()


@cache
def _product() -> Product:
    @torch.library.register_fake("fastsam::product")
    def _(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
        return a.new_empty(a.shape[0], a.shape[1], b.shape[2])

    made: Product = torch.ops.fastsam.product.default
    return made
