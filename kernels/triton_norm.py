"""Sums of squares in Triton: `norm_` of `reference`, where the equations stand, and what `update_norm_` shares with it.

One launch: a float64 partial sum per chunk, and their sum by the last program of the row, both in an order that the table alone fixes.
"""

# The parameters of a kernel are values on the device, which have no Python type.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .triton_call import Call, compilable, compute_type
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
from .triton_tickets import last_of_row, tickets_of


@triton.jit
def sum_partials(out, partials, n_chunks, ACCUMULATE: tl.constexpr):
    """`out (+)=` the sum of a row's partial sums, in an order that their number alone fixes."""
    lane = tl.arange(0, LANES)
    total = tl.zeros([LANES], dtype=tl.float64)
    start = 0
    while start < n_chunks:
        total += tl.load(partials + start + lane, mask=start + lane < n_chunks, other=0)
        start += LANES
    result = pairwise_sum(total, LOG2_LANES)
    if ACCUMULATE:
        result += tl.load(out)
    tl.store(out, result)


@triton.jit
def finish_row(sumsq, sumsq_stride, partials, tickets, row, n_chunks, total, ACCUMULATE: tl.constexpr):
    """Stores this chunk's partial sum, that of the lanes of `total`; the last program of the row adds all of them up."""
    tl.store(partials + tl.program_id(0), pairwise_sum(total.to(tl.float64), LOG2_LANES))
    if last_of_row(tickets, row, n_chunks):
        sum_partials(sumsq + row * sumsq_stride, partials + row * n_chunks, n_chunks, ACCUMULATE)


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
    sumsq, partials, tickets, grads, weights, chunks, table, hyper,
    n_chunks, segments, sumsq_stride, hyper_row, hyper_group, grads_stride, weights_stride,
    GRADS_FLAT: tl.constexpr, GRADS_DTYPE: tl.constexpr, WEIGHTS_FLAT: tl.constexpr, WEIGHTS_DTYPE: tl.constexpr,
    COMPUTE: tl.constexpr, ALIGNED: tl.constexpr, ACCUMULATE: tl.constexpr,
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
    finish_row(sumsq, sumsq_stride, partials, tickets, row, n_chunks, total, ACCUMULATE)


def sum_chunks_(
    kernel: Any, sumsq: Tensor, operand: Sequence[Tensor], call: Call, accumulate: bool, **args: Any
) -> None:
    """`sumsq[r] (+)=` what `kernel`, which ends in `finish_row`, adds up over the row's chunks of `operand`, in whose dtype it computes."""
    if not call.plan.n_chunks:
        if not accumulate:
            sumsq.zero_()
        return
    partials = torch.empty(call.rows * call.plan.n_chunks, dtype=torch.float64, device=call.device)
    args |= {"sumsq": sumsq, "sumsq_stride": sumsq.stride(0), "partials": partials, "ACCUMULATE": accumulate}
    compute = compute_type(operand[0].dtype)
    call.each_chunk(kernel, tickets=tickets_of(sumsq, call.rows), COMPUTE=compute, **args)


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
    sum_chunks_(_norm_kernel, sumsq, grads, call, accumulate)
