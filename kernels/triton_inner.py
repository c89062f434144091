"""What federated rounds add up, in Triton: `inner_` and `accumulate_` of `reference`, where the equations stand."""

# The parameters of a kernel are values on the device, which have no Python type.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from .conventions import HIGH_BITS, LIMIT, LOW_BITS
from .triton_call import Call, compilable, launch
from .triton_common import CHUNK, LANES, LOG2_LANES, list_base, load, locate, pairwise_sum, widen
from .triton_norm import sum_partials
from .triton_tickets import last_of_row, tickets_of

LOW_UNIT = tl.constexpr(2.0**LOW_BITS)
LOW_SHIFT, LOW_MASK = tl.constexpr(LOW_BITS), tl.constexpr((1 << LOW_BITS) - 1)
LARGEST = tl.constexpr(LIMIT * 2.0**HIGH_BITS)  # of what is added, in units of 2^-28
INFINITY = tl.constexpr(float("inf"))


@triton.jit
def _add_products(xy, yy, x, y, lane, rest, MASKED: tl.constexpr):
    a = widen(load(x, lane, rest, MASKED), tl.float64)
    b = widen(load(y, lane, rest, MASKED), tl.float64)
    return xy + a * b, yy + b * b


@triton.jit(do_not_specialize=["n_chunks", "segments", "apart"])
def _inner_kernel(
    out, partials, tickets, x, y, chunks, table,
    n_chunks, segments, apart, out_row, out_stride, x_stride, y_stride,
    X_FLAT: tl.constexpr, X_DTYPE: tl.constexpr, Y_FLAT: tl.constexpr, Y_DTYPE: tl.constexpr, ALIGNED: tl.constexpr,
    ACCUMULATE: tl.constexpr,
):  # fmt: skip
    row, segment, begin, rest, offset, _ = locate(chunks, table, n_chunks)
    x = list_base(x, row, x_stride, segment, segments, offset, begin, X_FLAT, X_DTYPE, ALIGNED)
    y = list_base(y, row, y_stride, segment, segments, offset, begin, Y_FLAT, Y_DTYPE, ALIGNED)
    lane = tl.arange(0, LANES)
    xy = tl.zeros([LANES], dtype=tl.float64)
    yy = tl.zeros([LANES], dtype=tl.float64)
    if rest >= CHUNK:
        for start in tl.static_range(0, CHUNK, LANES):
            xy, yy = _add_products(xy, yy, x, y, start + lane, rest, False)
    else:
        start = 0
        while start < rest:
            xy, yy = _add_products(xy, yy, x, y, start + lane, rest, True)
            start += LANES
    tl.store(partials + tl.program_id(0), pairwise_sum(xy, LOG2_LANES))
    tl.store(partials + apart + tl.program_id(0), pairwise_sum(yy, LOG2_LANES))
    if last_of_row(tickets, row, n_chunks):
        mine, first = out + row * out_row, partials + row * n_chunks
        sum_partials(mine, first, n_chunks, ACCUMULATE)
        sum_partials(mine + out_stride, first + apart, n_chunks, ACCUMULATE)


@compilable("(Tensor(a!) out, Tensor[] x, Tensor[] y, Tensor table, bool accumulate=False) -> ()")
def inner_(out: Tensor, x: Sequence[Tensor], y: Sequence[Tensor], table: Tensor, accumulate: bool = False) -> None:
    """See `reference.inner_`."""
    call = Call(table, out.shape[0], out.device)
    call.operand("x", x)
    call.operand("y", y)
    if not call.plan.n_chunks:
        if not accumulate:
            out.zero_()
        return
    apart = call.rows * call.plan.n_chunks
    partials = torch.empty(2, apart, dtype=torch.float64, device=out.device)
    places = {"out": out, "out_row": out.stride(0), "out_stride": out.stride(1), "partials": partials, "apart": apart}
    call.each_chunk(_inner_kernel, tickets=tickets_of(out, call.rows), ACCUMULATE=accumulate, **places)


@triton.jit(do_not_specialize=["rows", "apart"])
def _accumulate_kernel(
    high, low, x, base, largest, scale, n, rows, row_stride, apart,
    BASED: tl.constexpr, MEASURED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    lane = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = lane < n
    factor = tl.load(scale)
    total = tl.load(high + lane, mask=mask, other=0)
    rest = tl.load(low + lane, mask=mask, other=0)
    if BASED:
        start = tl.load(base + lane, mask=mask, other=0)
    row = tl.full([], 0, dtype=tl.int64)
    while row < rows:
        d = tl.load(x + row * row_stride + lane, mask=mask, other=0)
        if BASED:
            d = d - start
        d = d.to(tl.float64)
        value = tl.where(tl.abs(d * factor) <= LARGEST, d * factor, 0.0)
        whole = value.to(tl.int64)
        rest += ((value - whole.to(tl.float64)) * LOW_UNIT).to(tl.int64)
        total += whole + (rest >> LOW_SHIFT)
        rest = rest & LOW_MASK
        if MEASURED:
            size = tl.where(tl.abs(d) < INFINITY, tl.abs(d), INFINITY)
            tl.store(largest + row * apart + tl.program_id(0), tl.max(size))
        row += 1
    tl.store(high + lane, total, mask=mask)
    tl.store(low + lane, rest, mask=mask)


@compilable(
    "(Tensor(a!) high_, Tensor(b!) low_, Tensor x, float factor, *, Tensor? base=None, Tensor(c!)? largest_=None) -> ()"
)
def accumulate_(
    high_: Tensor,
    low_: Tensor,
    x: Tensor,
    factor: float,
    *,
    base: Tensor | None = None,
    largest_: Tensor | None = None,
) -> None:
    """See `reference.accumulate_`."""
    several = x.dim() > high_.dim()
    rows, n = x.shape[0] if several else 1, high_.numel()
    programs = triton.cdiv(n, LANES.value) if rows else 0
    # A Python number would reach the kernel as float32.
    scale = torch.full((1,), factor * 2.0**HIGH_BITS, dtype=torch.float64, device=x.device)
    partials = torch.empty(rows, programs, dtype=torch.float64, device=x.device) if largest_ is not None else None
    args = {"high": high_, "low": low_, "x": x, "base": base, "largest": partials, "scale": scale, "n": n, "rows": rows}
    args |= {"row_stride": x.stride(0) if several else 0, "apart": programs}
    args |= {"BASED": base is not None, "MEASURED": largest_ is not None, "BLOCK": LANES}
    launch(_accumulate_kernel, programs, x.device, **args)
    if largest_ is not None and partials is not None:
        found = partials.amax(1) if programs else torch.zeros_like(largest_)
        largest_.copy_(torch.where(found.isfinite(), found, torch.nan))
