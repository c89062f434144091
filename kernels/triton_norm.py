"""Sums of squares in Triton: `norm_` of `reference`, which has the equations, and functions for other ops that compute
sums.

One launch computes a float64 partial sum per chunk. The last program of a row adds them up. The order of both sums
depends only on the table.
"""

# The parameters of a kernel are values on the device, which have no Python type.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import reference
from .triton_chunks import add_up, columns, locate, read, read_if
from .triton_common import LANES, LOG2_LANES, pairwise_sum
from .triton_op import Call, compilable, compute_type
from .triton_tickets import last_of_row, tickets_of


@triton.jit
def _sum_partials(out, partials, n_chunks, ACCUMULATE: tl.constexpr):
    """Compute `out (+)=` the sum of a row's partial sums, in an order that depends only on their number."""
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
def finish_row(sums, totals, chunk, ACCUMULATE: tl.constexpr):
    """Store the chunk's partial sums of the lanes of `totals`; the row's last program adds up all of them."""
    out, row_stride, stride, partials, tickets = sums
    stride_of_sums = tl.num_programs(0)
    for i in tl.static_range(len(totals)):
        partial = pairwise_sum(totals[i].to(tl.float64), LOG2_LANES)
        tl.store(partials + i * stride_of_sums + tl.program_id(0), partial)
    if last_of_row(tickets, chunk.row, chunk.n_chunks):
        out += chunk.row * row_stride
        partials += chunk.row * chunk.n_chunks
        for i in tl.static_range(len(totals)):
            _sum_partials(out + i * stride, partials + i * stride_of_sums, chunk.n_chunks, ACCUMULATE)


@triton.jit
def _add_direction(totals, operands, numbers, elements):
    """Return the sums plus `d^2`, with `d = T*g` in an adaptive group; weights are read only in adaptive groups."""
    grads, weights = operands
    adaptive, eta = numbers
    d = read(grads, elements)
    if weights is not None:
        w = read_if(adaptive, weights, elements)
        d = tl.where(adaptive, (tl.abs(w) + eta) * d, d)
    return (totals[0] + d * d,)


@triton.jit(do_not_specialize=["n_chunks", "segments"])
def _norm_kernel(
    sums, grads, weights, plan, hparams, n_chunks, segments,
    COMPUTE: tl.constexpr, ALIGNED: tl.constexpr, ACCUMULATE: tl.constexpr,
):  # fmt: skip
    chunk = locate(plan, n_chunks, segments)
    h = columns(hparams, chunk)
    numbers = h.adaptive != 0, h.eta.to(COMPUTE)
    totals = add_up(_add_direction, 1, (grads, weights), numbers, chunk, COMPUTE, ALIGNED)
    finish_row(sums, totals, chunk, ACCUMULATE)


def sum_chunks_(kernel: Any, out: Tensor, call: Call, accumulate: bool, **args: Any) -> None:
    """Compute `out[r] (+)=` the sum over the row's chunks that `kernel` computes, which must end in `finish_row`.

    A sum is one number, or one number per column of `out`.
    """
    if not call.plan.n_chunks:
        if not accumulate:
            out.zero_()
        return
    row_stride, stride = (*out.stride(), 0)[:2]
    partials = torch.empty(out[0].numel() * call.programs, dtype=torch.float64, device=call.device)
    sums = (out, row_stride, stride, partials, tickets_of(out, call.rows))
    call.each_chunk(kernel, sums=sums, ACCUMULATE=accumulate, **args)


def norm_call(call: Call, sumsq: Tensor, partials: Tensor, tickets: Tensor, compute: tl.dtype) -> partial[None]:
    """Return the launch of `norm_` with the operands of `call`, and with memory that is the caller's.

    Args:
        call: the operands `grads` and `weights`.
        sumsq: output, the squared norm, float64 `[1]`.
        partials: memory for a sum of each program, float64.
        tickets: int32 `[1]`, 0 between launches.
        compute: type of the arithmetic.
    """
    sums = (sumsq, sumsq.stride(0), 0, partials, tickets)
    return call.chunk_call(_norm_kernel, sums=sums, ACCUMULATE=False, COMPUTE=compute)


@compilable(reference.norm_, "sumsq")
def norm_(sumsq, grads, weights, table, hparams, accumulate=False):
    """See `reference.norm_`."""
    call = Call(table, hparams.shape[0], sumsq.device, hparams, grads=grads, weights=weights)
    sum_chunks_(_norm_kernel, sumsq, call, accumulate, COMPUTE=compute_type(grads))
