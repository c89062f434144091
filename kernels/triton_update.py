"""Form U with SGD's momentum in Triton: `update_norm_` and `update_sgd_` of `reference`, where the equations stand."""

# The parameters of a kernel are values on the device, which have no Python type.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from .conventions import CLIP_EPS
from .triton_call import Call, compilable, compute_type, wrote
from .triton_common import (
    BLOCK,
    CHUNK,
    CLIP,
    CLIP_FULL,
    DAMPENING,
    DECAY,
    LANES,
    LR,
    MOMENTUM,
    NESTEROV,
    PHI,
    A,
    B,
    field_base,
    inverse,
    list_base,
    load,
    load_if,
    locate,
    running,
    store_if,
    widen,
    write,
)
from .triton_norm import finish_row, sum_chunks_

EPSILON = tl.constexpr(CLIP_EPS)


@triton.jit
def _linear(grads, g1, q, lane, rest, a, b, COMPUTE: tl.constexpr, MASKED: tl.constexpr):
    """`v = a*g2 + b*g1 + q`."""
    v = a * widen(load(grads, lane, rest, MASKED), COMPUTE)
    if g1 is not None:
        v += b * widen(load(g1, lane, rest, MASKED), COMPUTE)
    if q is not None:
        v += load(q, lane, rest, MASKED)
    return v


@triton.jit
def _add_update(total, origin, grads, g1, q, lane, rest, a, b, phi, full, COMPUTE: tl.constexpr, MASKED: tl.constexpr):
    """`total + v^2`, with `phi*w` in `v` where the clipped norm has it; only there the weights are read."""
    v = _linear(grads, g1, q, lane, rest, a, b, COMPUTE, MASKED)
    w = widen(load_if(full, origin, lane, rest, MASKED), COMPUTE)
    v = tl.where(full, v + phi * w, v)
    return total + v * v


@triton.jit(do_not_specialize=["n_chunks", "segments"])
def _update_norm_kernel(
    sumsq, partials, tickets, z, origin, grads, g1, q, grad_scale, chunks, table, hyper,
    n_chunks, segments, sumsq_stride, hyper_row, hyper_group, z_stride, origin_stride, grads_stride, g1_stride, q_stride,
    Z_FLAT: tl.constexpr, Z_DTYPE: tl.constexpr, GRADS_FLAT: tl.constexpr, GRADS_DTYPE: tl.constexpr,
    G1_FLAT: tl.constexpr, G1_DTYPE: tl.constexpr,
    COMPUTE: tl.constexpr, ALIGNED: tl.constexpr, ACCUMULATE: tl.constexpr,
):  # fmt: skip
    row, segment, begin, rest, offset, group = locate(chunks, table, n_chunks)
    h = hyper + row * hyper_row + group * hyper_group
    a = (tl.load(h + A) * inverse(grad_scale)).to(COMPUTE)
    b = tl.load(h + B).to(COMPUTE)
    phi = tl.load(h + PHI).to(COMPUTE)
    full = tl.load(h + CLIP_FULL) != 0
    grads = list_base(grads, row, grads_stride, segment, segments, offset, begin, GRADS_FLAT, GRADS_DTYPE, ALIGNED)
    if g1 is not None:
        g1 = list_base(g1, row, g1_stride, segment, segments, offset, begin, G1_FLAT, G1_DTYPE, ALIGNED)
    if q is not None:
        q = field_base(q, row, q_stride, offset, begin, ALIGNED)
    if origin is None:
        w = list_base(z, row, z_stride, segment, segments, offset, begin, Z_FLAT, Z_DTYPE, ALIGNED)
    else:
        w = field_base(origin, row, origin_stride, offset, begin, ALIGNED)
    lane = tl.arange(0, LANES)
    total = tl.zeros([LANES], dtype=COMPUTE)
    if rest >= CHUNK:
        for start in tl.static_range(0, CHUNK, LANES):
            total = _add_update(total, w, grads, g1, q, start + lane, rest, a, b, phi, full, COMPUTE, False)
    else:
        start = 0
        while start < rest:
            total = _add_update(total, w, grads, g1, q, start + lane, rest, a, b, phi, full, COMPUTE, True)
            start += LANES
    finish_row(sumsq, sumsq_stride, partials, tickets, row, n_chunks, total, ACCUMULATE)


@compilable(
    "(Tensor(a!) sumsq, Tensor[] z, Tensor? origin, Tensor[] grads, Tensor table, Tensor hyper, "
    "Tensor[]? g1=None, Tensor? q=None, Tensor? grad_scale=None, bool accumulate=False) -> ()"
)
def update_norm_(
    sumsq: Tensor,
    z: Sequence[Tensor],
    origin: Tensor | None,
    grads: Sequence[Tensor],
    table: Tensor,
    hyper: Tensor,
    g1: Sequence[Tensor] | None = None,
    q: Tensor | None = None,
    grad_scale: Tensor | None = None,
    accumulate: bool = False,
) -> None:
    """See `reference.update_norm_`."""
    call = _call(z, origin, grads, table, hyper, g1, q)
    sum_chunks_(_update_norm_kernel, sumsq, z, call, accumulate, grad_scale=grad_scale)


def _call(
    z: Sequence[Tensor],
    origin: Tensor | None,
    grads: Sequence[Tensor],
    table: Tensor,
    hyper: Tensor,
    g1: Sequence[Tensor] | None,
    q: Tensor | None,
) -> Call:
    call = Call(table, hyper.shape[0], hyper.device, hyper)
    call.operand("z", z)
    call.operand("grads", grads)
    call.operand("g1", g1)
    call.field("origin", origin)
    call.field("q", q)
    return call


@triton.jit
def _sgd_block(
    z, origin, momentum, grads, g1, q, shift, lane, rest,
    a, b, phi, full, sig, decay, mu, undamped, nesterov, lr, run,
    FIRST: tl.constexpr, KEEP: tl.constexpr, COMPUTE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    w = widen(load(z if origin is None else origin, lane, rest, MASKED), COMPUTE)
    v = _linear(grads, g1, q, lane, rest, a, b, COMPUTE, MASKED)
    decaying = w if shift is None else w - load(shift, lane, rest, MASKED)
    d = sig * tl.where(full, v + phi * w, v) + decay * decaying
    if momentum is not None:
        buffer = d if FIRST else mu * load(momentum, lane, rest, MASKED) + undamped * d
        store_if(run, momentum, lane, rest, buffer, MASKED)
        d = tl.where(nesterov, d + mu * buffer, buffer)
    write(z, origin, lane, rest, w, w - lr * d, run, KEEP, MASKED)


@triton.jit
def _clip_factor(h, sumsq_v, row, sumsq_stride, COMPUTE: tl.constexpr):
    """`sig`."""
    if sumsq_v is None:
        sig = tl.full([], 1.0, tl.float64)
    else:
        limit = tl.load(h + CLIP)
        factor = limit / (tl.sqrt(tl.load(sumsq_v + row * sumsq_stride)) + EPSILON)
        # Not a minimum: the factor of a NaN norm is NaN, as in the reference.
        sig = tl.where((limit > 0) & ~(factor > 1.0), factor, 1.0)
    return sig.to(COMPUTE)


@triton.jit(do_not_specialize=["n_chunks", "segments"])
def _sgd_kernel(
    z, origin, momentum, grads, g1, q, shift, sumsq_v, grad_scale, found_inf, chunks, table, hyper,
    n_chunks, segments, hyper_row, hyper_group, sumsq_stride,
    z_stride, origin_stride, momentum_stride, grads_stride, g1_stride, q_stride, shift_stride,
    Z_FLAT: tl.constexpr, Z_DTYPE: tl.constexpr, GRADS_FLAT: tl.constexpr, GRADS_DTYPE: tl.constexpr,
    G1_FLAT: tl.constexpr, G1_DTYPE: tl.constexpr, FIRST: tl.constexpr, KEEP: tl.constexpr,
    COMPUTE: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    row, segment, begin, rest, offset, group = locate(chunks, table, n_chunks)
    h = hyper + row * hyper_row + group * hyper_group
    a = (tl.load(h + A) * inverse(grad_scale)).to(COMPUTE)
    b = tl.load(h + B).to(COMPUTE)
    full = tl.load(h + CLIP_FULL) != 0
    phi = tl.load(h + PHI)
    decay = (tl.load(h + DECAY) + tl.where(full, 0.0, phi)).to(COMPUTE)
    phi = phi.to(COMPUTE)
    sig = _clip_factor(h, sumsq_v, row, sumsq_stride, COMPUTE)
    mu = tl.load(h + MOMENTUM).to(COMPUTE)
    undamped = (1.0 - tl.load(h + DAMPENING)).to(COMPUTE)
    nesterov = tl.load(h + NESTEROV) != 0
    lr = tl.load(h + LR).to(COMPUTE)
    run = running(found_inf)
    z = list_base(z, row, z_stride, segment, segments, offset, begin, Z_FLAT, Z_DTYPE, ALIGNED)
    grads = list_base(grads, row, grads_stride, segment, segments, offset, begin, GRADS_FLAT, GRADS_DTYPE, ALIGNED)
    if g1 is not None:
        g1 = list_base(g1, row, g1_stride, segment, segments, offset, begin, G1_FLAT, G1_DTYPE, ALIGNED)
    if q is not None:
        q = field_base(q, row, q_stride, offset, begin, ALIGNED)
    if shift is not None:
        shift = field_base(shift, row, shift_stride, offset, begin, ALIGNED)
    if origin is not None:
        origin = field_base(origin, row, origin_stride, offset, begin, ALIGNED)
    if momentum is not None:
        momentum = field_base(momentum, row, momentum_stride, offset, begin, ALIGNED)
    lane = tl.arange(0, BLOCK)
    if rest >= CHUNK:
        for start in tl.static_range(0, CHUNK, BLOCK):
            _sgd_block(
                z, origin, momentum, grads, g1, q, shift, start + lane, rest,
                a, b, phi, full, sig, decay, mu, undamped, nesterov, lr, run, FIRST, KEEP, COMPUTE, False,
            )  # fmt: skip
    else:
        start = 0
        while start < rest:
            _sgd_block(
                z, origin, momentum, grads, g1, q, shift, start + lane, rest,
                a, b, phi, full, sig, decay, mu, undamped, nesterov, lr, run, FIRST, KEEP, COMPUTE, True,
            )  # fmt: skip
            start += BLOCK


@compilable(
    "(Tensor(a!)[] z, Tensor(b!)? origin, Tensor[] grads, Tensor table, Tensor hyper, Tensor(c!)? momentum=None, "
    "Tensor[]? g1=None, Tensor? q=None, Tensor? sumsq_v=None, Tensor? grad_scale=None, Tensor? found_inf=None, "
    "bool first=False, bool keep=False, Tensor? shift=None) -> ()"
)
def update_sgd_(
    z: Sequence[Tensor],
    origin: Tensor | None,
    grads: Sequence[Tensor],
    table: Tensor,
    hyper: Tensor,
    momentum: Tensor | None = None,
    g1: Sequence[Tensor] | None = None,
    q: Tensor | None = None,
    sumsq_v: Tensor | None = None,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
    first: bool = False,
    keep: bool = False,
    shift: Tensor | None = None,
) -> None:
    """See `reference.update_sgd_`."""
    if not z:
        return
    call = _call(z, origin, grads, table, hyper, g1, q)
    call.field("momentum", momentum)
    call.field("shift", shift)
    scalars = {"sumsq_v": sumsq_v, "grad_scale": grad_scale, "found_inf": found_inf}
    stride = 0 if sumsq_v is None else sumsq_v.stride(0)
    compute = compute_type(z[0].dtype)
    call.each_chunk(_sgd_kernel, **scalars, sumsq_stride=stride, FIRST=first, KEEP=keep, COMPUTE=compute)
    wrote(z)
