"""Largest differences of a backend from the reference in float64 on the same (upcast) inputs: one table for all tests.

`TOLERANCE[dtype]` is `(rtol, atol)` of a tensor of that dtype, for operands of order 1. The arithmetic of an op is some
20 operations deep, each rounded to a unit roundoff u, and its intermediate values are at most some 50 in size.
"""

import torch

TOLERANCE: dict[torch.dtype, tuple[float, float]] = {
    # u = 1.1e-16; sums of squares add some 10,000 numbers in an order of the backend's own: sqrt(10,000)*u.
    torch.float64: (1e-13, 1e-13),
    # u = 6e-8, times 20 operations; the absolute part is for results that are small because operands cancelled.
    torch.float32: (2e-6, 4e-6),
    # Computed in float32, then rounded once: half a unit in the last of 11 bits.
    torch.float16: (2.0**-11, 4e-6),
    # Computed in float32, then rounded once: half a unit in the last of 8 bits.
    torch.bfloat16: (2.0**-8, 4e-6),
}


def trajectory(dtype: torch.dtype, steps: int) -> tuple[float, float]:
    """Return `(rtol, atol)` of weights after `steps` steps with the same gradients.

    Rounding errors of the steps add up at most linearly. Adam divides by the root of a second moment, which makes a
    rounding of the gradient's square relative to the step: hence the 4. Half-precision weights are compared through
    their float32 master copy.
    """
    rtol, atol = TOLERANCE[torch.float32 if dtype.itemsize == 2 else dtype]
    return 4 * steps * rtol, 4 * steps * atol


def tolerances_of(dtype: torch.dtype) -> tuple[float, float]:
    """`(rtol, atol)` of a number rounded to `dtype` from two float32 results that differ in their last bits: they may
    round to neighbours."""
    rtol, atol = TOLERANCE[dtype]
    return 2 * rtol if dtype.itemsize == 2 else rtol, atol
