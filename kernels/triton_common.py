"""Arithmetic that the Triton kernels share: conversions, exact division, sums in a fixed order.

The kernels are compiled without fusing multiply and add. So their results are the results of the expressions as
written, for any alignment of the operands.
"""

# The parameters of a kernel are values on the device, which have no Python type.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl

LOG2_LANES = tl.constexpr(9)
LANES = tl.constexpr(512)  # partial sums of a chunk: one 128-bit load of float32 per thread and iteration
WARPS = 4
BITS = tl.constexpr(25)  # float32 counts to 2**24


@triton.jit
def divide(x, y):
    """Return `x / y`, correctly rounded (Triton's own `/` of float32 is not)."""
    return x / y if x.dtype == tl.float64 else tl.div_rn(x, y)


# Triton's interpreter truncates float32 to bfloat16 and spoils subnormal numbers, so the bits are converted by hand
# there.
INTERPRETED = tl.constexpr(not isinstance(divide, triton.runtime.JITFunction))


@triton.jit
def widen(x, COMPUTE: tl.constexpr):
    """Convert from the storage dtype to the dtype of the arithmetic. The conversion is exact."""
    if INTERPRETED and x.dtype == tl.bfloat16:
        x = (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    return x.to(COMPUTE)


@triton.jit
def narrow(x, DTYPE: tl.constexpr):
    """Convert from the dtype of the arithmetic to the storage dtype, to nearest, ties to even."""
    if INTERPRETED and tl.bfloat16 == DTYPE and x.dtype != DTYPE:
        bits = x.to(tl.uint32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        y = tl.where(x == x, bits, 0x7FC0).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        y = x.to(DTYPE)
    return y


@triton.jit
def root(x):
    """Return the square root, correctly rounded (Triton's own of float32 is not)."""
    return tl.sqrt(x) if x.dtype == tl.float64 else tl.sqrt_rn(x)


@triton.jit
def power(base, exponent):
    """Return `base**exponent` in float64 for a whole exponent below 2**25, by squaring."""
    result = tl.full(base.shape, 1.0, tl.float64)
    bits = exponent.to(tl.int32)
    for _ in tl.static_range(BITS):
        result = tl.where((bits & 1) != 0, result * base, result)
        base = base * base
        bits = bits >> 1
    return result


@triton.jit
def pairwise_sum(x, STEPS: tl.constexpr):
    """Return the sum of `2**STEPS` numbers: halves are added until one number is left.

    A plain `tl.sum` adds in an order that depends on the distribution of elements over threads, and so on the alignment
    of the loaded data.
    """
    for _ in tl.static_range(STEPS):
        x = tl.sum(tl.reshape(x, [2, x.shape[0] // 2]), 0)
    return tl.sum(x, 0)
