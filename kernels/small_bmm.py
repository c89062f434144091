"""Products of stacked clients' small matrices, on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from fastsam_kernels import native

Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]

# Smallest number of multiplications of a call for which the function is faster, and largest number of a matrix with
# which it was measured (see docs/kernels.md).
_MIN_PRODUCTS, _MAX_PRODUCTS = 2**16, 2**21


def product_of(a: Tensor, b: Tensor) -> Product | None:
    """Return a function `f(a, b, bias)` that computes `a @ b`, plus `bias` if it is not None, faster than torch.

    Returns None if torch is faster for such matrices. An element of the result is the sum of its products in the order
    of k, and the bias is added last. So its bits depend neither on the other rows nor on the memory order.

    Args:
        a, b: float32 `[rows, m, k]` and `[rows, k, n]` in any strides. `bias` is `[rows, m, n]`, or broadcasts to it.
    """
    if a.device.type != "cpu" or a.dtype != torch.float32 or b.dtype != a.dtype or not a.dim() == b.dim() == 3:
        return None
    (rows, m, k), n = a.shape, b.shape[2]
    if not _MIN_PRODUCTS <= rows * m * k * n <= rows * _MAX_PRODUCTS or native.why_not("cpu") is not None:
        return None
    return _product()


@cache
def _product() -> Product:
    @torch.library.register_fake("fastsam::product")
    def _(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
        return a.new_empty(a.shape[0], a.shape[1], b.shape[2])

    product: Product = torch.ops.fastsam.product.default
    return product
