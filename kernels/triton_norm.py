"""Sums of squares in Triton: `norm_` of `reference`, where the equations stand, and what `update_norm_` shares with it.

Two launches: a float64 partial sum per chunk, then their sum per row, both in an order that the table alone fixes. No atomics.
"""

# The parameters of a kernel are values on the device, which have no Python type.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from .triton_call import Call, compilable, compute_type, launch
from .triton_common import (
    ADAPTIVE,
    CHUNK,
    ETA,
    LANES,
    LOG2_LANES,
    list_base,
    load,
    load_if,
    locate,
    pairwise_sum,
    widen,
)


@triton.jit
def _add_direction(total, grads, weights, lane, rest, adaptive, eta, COMPUTE: tl.constexpr, MASKED: tl.constexpr):
    """`total + d^2` with `d = T*g` in an adaptive group; only there the weights are read."""
    d = widen(load(grads, lane, rest, MASKED), COMPUTE)
    if weights is not None:
        w = widen(load_if(adaptive, weights, lane, rest, MASKED), COMPUTE)
        d = tl.where(adaptive, (tl.abs(w) + eta) * d, d)
    return total + d * d


@triton.jit(do_not_specialize=["n_chunks", "segments"])
def _norm_kernel(
    partials, grads, weights, chunks, table, hyper,
    n_chunks, segments, hyper_row, hyper_group, grads_stride, weights_stride,
    GRADS_FLAT: tl.constexpr, GRADS_DTYPE: tl.constexpr, WEIGHTS_FLAT: tl.constexpr, WEIGHTS_DTYPE: tl.constexpr,
    COMPUTE: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    row, segment, begin, rest, offset, group = locate(chunks, table, n_chunks)
    h = hyper + row * hyper_row + group * hyper_group
    adaptive = tl.load(h + ADAPTIVE) != 0
    eta = tl.load(h + ETA).to(COMPUTE)
    grads = list_base(grads, row, grads_stride, segment, segments, offset, begin, GRADS_FLAT, GRADS_DTYPE, ALIGNED)
    if weights is not None:
        weights = list_base(
            weights, row, weights_stride, segment, segments, offset, begin, WEIGHTS_FLAT, WEIGHTS_DTYPE, ALIGNED
        )
    lane = tl.arange(0, LANES)
    total = tl.zeros([LANES], dtype=COMPUTE)
    if rest >= CHUNK:
        for start in tl.static_range(0, CHUNK, LANES):
            total = _add_direction(total, grads, weights, start + lane, rest, adaptive, eta, COMPUTE, False)
    else:
        start = 0
        while start < rest:
            total = _add_direction(total, grads, weights, start + lane, rest, adaptive, eta, COMPUTE, True)
            start += LANES
    tl.store(partials + tl.program_id(0), pairwise_sum(total.to(tl.float64), LOG2_LANES))


@triton.jit(do_not_specialize=["n_chunks"])
def _finish_kernel(sumsq, partials, n_chunks, sumsq_stride, ACCUMULATE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, LANES)
    total = tl.zeros([LANES], dtype=tl.float64)
    start = 0
    while start < n_chunks:
        total += tl.load(partials + row * n_chunks + start + lane, mask=start + lane < n_chunks, other=0)
        start += LANES
    result = pairwise_sum(total, LOG2_LANES)
    if ACCUMULATE:
        result += tl.load(sumsq + row * sumsq_stride)
    tl.store(sumsq + row * sumsq_stride, result)


def partials_of(call: Call) -> Tensor:
    """Room for a partial sum per row and chunk."""
    return torch.empty(call.rows * call.plan.n_chunks, dtype=torch.float64, device=call.device)


def finish_(sumsq: Tensor, partials: Tensor, call: Call, accumulate: bool) -> None:
    """`sumsq[r] (+)=` the sum of the row's partial sums."""
    args = {"sumsq": sumsq, "partials": partials, "n_chunks": call.plan.n_chunks, "sumsq_stride": sumsq.stride(0)}
    launch(_finish_kernel, call.rows, call.device, **args, ACCUMULATE=accumulate)


@compilable(
    "(Tensor(a!) sumsq, Tensor[] grads, Tensor[] weights, Tensor table, Tensor hyper, bool accumulate=False) -> ()"
)
def norm_(
    sumsq: Tensor,
    grads: Sequence[Tensor],
    weights: Sequence[Tensor],
    table: Tensor,
    hyper: Tensor,
    accumulate: bool = False,
) -> None:
    """See `reference.norm_`."""
    call = Call(table, hyper.shape[0], sumsq.device, hyper)
    call.operand("grads", grads)
    call.operand("weights", weights)
    partials = partials_of(call)
    if grads:
        call.each_chunk(_norm_kernel, partials=partials, COMPUTE=compute_type(grads[0].dtype))
    finish_(sumsq, partials, call, accumulate)
