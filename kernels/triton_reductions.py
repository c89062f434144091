"""Sums of federated rounds in Triton: `inner_` and `accumulate_` of `reference`, which has the equations."""

# The parameters of a kernel are values on the device, which have no Python type.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import reference
from .constants import HIGH_BITS, LIMIT, LOW_BITS
from .triton_chunks import add_up, locate, read
from .triton_common import LANES
from .triton_norm import finish_row, sum_chunks_
from .triton_op import Call, compilable, launch

LOW_UNIT = tl.constexpr(2.0**LOW_BITS)
LOW_SHIFT, LOW_MASK = tl.constexpr(LOW_BITS), tl.constexpr((1 << LOW_BITS) - 1)
MAX_TERM = tl.constexpr(LIMIT * 2.0**HIGH_BITS)  # largest absolute value of a term, in units of 2^-28
INFINITY = tl.constexpr(float("inf"))


@triton.jit
def _add_products(totals, operands, numbers, elements):
    x, y = operands
    a, b = read(x, elements), read(y, elements)
    return totals[0] + a * b, totals[1] + b * b


@triton.jit(do_not_specialize=["n_chunks", "segments"])
def _inner_kernel(sums, x, y, plan, n_chunks, segments, ALIGNED: tl.constexpr, ACCUMULATE: tl.constexpr):
    chunk = locate(plan, n_chunks, segments)
    totals = add_up(_add_products, 2, (x, y), (), chunk, tl.float64, ALIGNED)
    finish_row(sums, totals, chunk, ACCUMULATE)


@compilable(reference.inner_, "out")
def inner_(out, x, y, table, accumulate=False):
    """See `reference.inner_`."""
    sum_chunks_(_inner_kernel, out, Call(table, out.shape[0], out.device, x=x, y=y), accumulate)


@triton.jit(do_not_specialize=["rows"])
def _accumulate_kernel(high, low, x, base, largest, scale, n, rows, row_stride):
    lane = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)
    mask = lane < n
    factor = tl.load(scale)
    total = tl.load(high + lane, mask=mask, other=0)
    fraction = tl.load(low + lane, mask=mask, other=0)
    if base is not None:
        start = tl.load(base + lane, mask=mask, other=0)
    row = tl.full([], 0, dtype=tl.int64)
    while row < rows:
        d = tl.load(x + row * row_stride + lane, mask=mask, other=0)
        if base is not None:
            d = d - start
        d = d.to(tl.float64)
        value = tl.where(tl.abs(d * factor) <= MAX_TERM, d * factor, 0.0)
        integer = value.to(tl.int64)
        fraction += ((value - integer.to(tl.float64)) * LOW_UNIT).to(tl.int64)
        total += integer + (fraction >> LOW_SHIFT)
        fraction = fraction & LOW_MASK
        if largest is not None:
            size = tl.where(tl.abs(d) < INFINITY, tl.abs(d), INFINITY)
            tl.store(largest + row * tl.num_programs(0) + tl.program_id(0), tl.max(size))
        row += 1
    tl.store(high + lane, total, mask=mask)
    tl.store(low + lane, fraction, mask=mask)


@compilable(reference.accumulate_, "high_", "low_", "largest_")
def accumulate_(high_, low_, x, factor, *, base=None, largest_=None):
    """See `reference.accumulate_`."""
    several = x.dim() > high_.dim()
    rows, n = x.shape[0] if several else 1, high_.numel()
    programs = triton.cdiv(n, LANES.value) if rows else 0
    # A Python number would reach the kernel as float32.
    scale = torch.full((1,), factor * 2.0**HIGH_BITS, dtype=torch.float64, device=x.device)
    partials = torch.empty(rows, programs, dtype=torch.float64, device=x.device) if largest_ is not None else None
    args = {"high": high_, "low": low_, "x": x, "base": base, "largest": partials, "scale": scale, "n": n, "rows": rows}
    launch(_accumulate_kernel, programs, x.device, row_stride=x.stride(0) if several else 0, **args)
    if largest_ is not None and partials is not None:
        maxima = partials.amax(1) if programs else torch.zeros_like(largest_)
        largest_.copy_(torch.where(maxima.isfinite(), maxima, torch.nan))
