"""A perturbation with a dual in Triton: `dual_norm_` and `dual_perturb_` of `reference`, where the equations stand."""

# The parameters of a kernel are values on the device, which have no Python type.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from .triton_call import Call, compilable, compute_type, wrote
from .triton_common import (
    BLOCK,
    CHUNK,
    LANES,
    NU,
    PENALTY,
    RHO,
    field_base,
    list_base,
    load,
    locate,
    narrow,
    store,
    widen,
)
from .triton_norm import finish_row, sum_chunks_


@triton.jit
def _direction(grads, mu, s, lane, rest, penalty, COMPUTE: tl.constexpr, MASKED: tl.constexpr):
    """`d = alpha*(g - mu) - s`, and what it was made of."""
    mu = load(mu, lane, rest, MASKED)
    s = load(s, lane, rest, MASKED)
    return penalty * (widen(load(grads, lane, rest, MASKED), COMPUTE) - mu) - s, mu, s


@triton.jit(do_not_specialize=["n_chunks", "segments"])
def _dual_norm_kernel(
    sumsq, partials, tickets, grads, mu, s, chunks, table, hyper,
    n_chunks, segments, sumsq_stride, hyper_row, hyper_group, grads_stride, mu_stride, s_stride,
    GRADS_FLAT: tl.constexpr, GRADS_DTYPE: tl.constexpr,
    COMPUTE: tl.constexpr, ALIGNED: tl.constexpr, ACCUMULATE: tl.constexpr,
):  # fmt: skip
    row, segment, begin, rest, offset, group = locate(chunks, table, n_chunks)
    penalty = tl.load(hyper + row * hyper_row + group * hyper_group + PENALTY).to(COMPUTE)
    grads = list_base(grads, row, grads_stride, segment, segments, offset, begin, GRADS_FLAT, GRADS_DTYPE, ALIGNED)
    mu = field_base(mu, row, mu_stride, offset, begin, ALIGNED)
    s = field_base(s, row, s_stride, offset, begin, ALIGNED)
    lane = tl.arange(0, LANES)
    total = tl.zeros([LANES], dtype=COMPUTE)
    if rest >= CHUNK:
        for start in tl.static_range(0, CHUNK, LANES):
            d, _, _ = _direction(grads, mu, s, start + lane, rest, penalty, COMPUTE, False)
            total += d * d
    else:
        start = 0
        while start < rest:
            d, _, _ = _direction(grads, mu, s, start + lane, rest, penalty, COMPUTE, True)
            total += d * d  # what is not read counts as zero in all three, hence here too
            start += LANES
    finish_row(sumsq, sumsq_stride, partials, tickets, row, n_chunks, total, ACCUMULATE)


@compilable(
    "(Tensor(a!) sumsq, Tensor[] grads, Tensor mu, Tensor s, Tensor table, Tensor hyper, bool accumulate=False) -> ()"
)
def dual_norm_(
    sumsq: Tensor,
    grads: Sequence[Tensor],
    mu: Tensor,
    s: Tensor,
    table: Tensor,
    hyper: Tensor,
    accumulate: bool = False,
) -> None:
    """See `reference.dual_norm_`."""
    call = Call(table, hyper.shape[0], sumsq.device, hyper)
    call.operand("grads", grads)
    call.field("mu", mu)
    call.field("s", s)
    sum_chunks_(_dual_norm_kernel, sumsq, grads, call, accumulate)


@triton.jit
def _dual_perturb_block(
    z, origin, mu, grads, s, eps, lane, rest, scale, penalty, inverse, moves,
    COMPUTE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    d, mu_, s_ = _direction(grads, mu, s, lane, rest, penalty, COMPUTE, MASKED)
    e = tl.where(moves, scale * d, 0.0)
    w = widen(load(origin, lane, rest, MASKED), COMPUTE)
    store(z, lane, rest, narrow(tl.where(moves, w + e, w), z.dtype.element_ty), MASKED)
    store(mu, lane, rest, mu_ + (e - s_) * inverse, MASKED)
    if eps is not None:
        store(eps, lane, rest, e, MASKED)


@triton.jit(do_not_specialize=["n_chunks", "segments"])
def _dual_perturb_kernel(
    z, origin, mu, grads, s, eps, sumsq, chunks, table, hyper,
    n_chunks, segments, hyper_row, hyper_group, sumsq_stride,
    z_stride, origin_stride, mu_stride, grads_stride, s_stride, eps_stride,
    Z_FLAT: tl.constexpr, Z_DTYPE: tl.constexpr, GRADS_FLAT: tl.constexpr, GRADS_DTYPE: tl.constexpr,
    COMPUTE: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    row, segment, begin, rest, offset, group = locate(chunks, table, n_chunks)
    h = hyper + row * hyper_row + group * hyper_group
    squares = tl.load(sumsq + row * sumsq_stride)
    moves = (squares > 0) & (squares < float("inf"))
    scale = (tl.load(h + RHO) / (tl.sqrt(squares) + tl.load(h + NU))).to(COMPUTE)
    penalty = tl.load(h + PENALTY)
    inverse = (1.0 / penalty).to(COMPUTE)
    penalty = penalty.to(COMPUTE)
    z = list_base(z, row, z_stride, segment, segments, offset, begin, Z_FLAT, Z_DTYPE, ALIGNED)
    grads = list_base(grads, row, grads_stride, segment, segments, offset, begin, GRADS_FLAT, GRADS_DTYPE, ALIGNED)
    origin = field_base(origin, row, origin_stride, offset, begin, ALIGNED)
    mu = field_base(mu, row, mu_stride, offset, begin, ALIGNED)
    s = field_base(s, row, s_stride, offset, begin, ALIGNED)
    if eps is not None:
        eps = field_base(eps, row, eps_stride, offset, begin, ALIGNED)
    lane = tl.arange(0, BLOCK)
    if rest >= CHUNK:
        for start in tl.static_range(0, CHUNK, BLOCK):
            _dual_perturb_block(
                z, origin, mu, grads, s, eps, start + lane, rest, scale, penalty, inverse, moves, COMPUTE, False
            )
    else:
        start = 0
        while start < rest:
            _dual_perturb_block(
                z, origin, mu, grads, s, eps, start + lane, rest, scale, penalty, inverse, moves, COMPUTE, True
            )
            start += BLOCK


@compilable(
    "(Tensor(a!)[] z, Tensor origin, Tensor(b!) mu, Tensor[] grads, Tensor s, Tensor table, Tensor hyper, "
    "Tensor sumsq, Tensor(c!)? eps=None) -> ()"
)
def dual_perturb_(
    z: Sequence[Tensor],
    origin: Tensor,
    mu: Tensor,
    grads: Sequence[Tensor],
    s: Tensor,
    table: Tensor,
    hyper: Tensor,
    sumsq: Tensor,
    eps: Tensor | None = None,
) -> None:
    """See `reference.dual_perturb_`."""
    call = Call(table, hyper.shape[0], origin.device, hyper)
    call.operand("z", z)
    call.operand("grads", grads)
    for name, field in (("origin", origin), ("mu", mu), ("s", s), ("eps", eps)):
        call.field(name, field)
    compute = compute_type(origin.dtype)
    call.each_chunk(_dual_perturb_kernel, sumsq=sumsq, sumsq_stride=sumsq.stride(0), COMPUTE=compute)
    wrote(z)
