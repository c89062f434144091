"""`perturb_` and `restore_` of `reference`, where the equations stand, in Triton."""

# The parameters of a kernel are values on the device, which have no Python type.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from .triton_call import Call, compilable, compute_type, wrote
from .triton_common import (
    ADAPTIVE,
    BLOCK,
    CHUNK,
    ETA,
    NU,
    RHO,
    field_base,
    list_base,
    load,
    locate,
    narrow,
    store,
    widen,
)


@triton.jit
def mix(x, key):
    """`_mix` of `rounding`, in uint32."""
    x = ((x ^ (x >> 16)) * 0x7FEB352D) ^ key
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def keys(seed):
    """The two words in which a seed (int64) enters the random bits."""
    first = mix(seed.to(tl.uint32), 0x9E3779B9)
    return first, mix((seed >> 32).to(tl.uint32) ^ first, 0x85EBCA6B)


@triton.jit
def stochastic(y, random, DTYPE: tl.constexpr):
    """`stochastic` of `rounding`: one of the two neighbours of `y` (float32) among the numbers of `DTYPE`."""
    HALF: tl.constexpr = tl.float16 == DTYPE
    DROPPED: tl.constexpr = 13 if HALF else 16
    size = tl.abs(y)
    raised = tl.where(size < 0.00006103515625, 0.00006103515625, 0.0) if HALF else tl.zeros_like(size)
    bits = (size + raised).to(tl.uint32, bitcast=True) + (random >> (32 - DROPPED))
    rounded = ((bits >> DROPPED) << DROPPED).to(tl.float32, bitcast=True) - raised
    sign = y.to(tl.uint32, bitcast=True) & 0x80000000
    rounded = (rounded.to(tl.uint32, bitcast=True) | sign).to(tl.float32, bitcast=True)
    return narrow(tl.where(y == y, rounded, y), DTYPE)


@triton.jit
def _perturb_block(
    z, origin, grads, lane, rest, scale, eta, adaptive, moves, first, second, place,
    SAVE: tl.constexpr, COMPUTE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    Z_DTYPE: tl.constexpr = z.dtype.element_ty
    if SAVE:
        kept = load(z, lane, rest, MASKED)
        if origin.dtype.element_ty != Z_DTYPE:
            # The master copy holds as long as z is its rounding; a NaN equals nothing and is taken from z.
            master = load(origin, lane, rest, MASKED)
            held = widen(kept, COMPUTE)
            kept = tl.where(widen(narrow(master, Z_DTYPE), COMPUTE) == held, master, held)
        store(origin, lane, rest, kept, MASKED)
    else:
        kept = load(origin, lane, rest, MASKED)
    w = widen(kept, COMPUTE)
    d = widen(load(grads, lane, rest, MASKED), COMPUTE)
    t = tl.abs(w) + eta
    d = tl.where(adaptive, t * t * d, d)
    if first is None:
        new = narrow(tl.where(moves, w + scale * d, w), Z_DTYPE)
    else:
        base = narrow(w, Z_DTYPE)
        random = mix((place + lane).to(tl.uint32) ^ first, second)
        new = tl.where(moves, stochastic(widen(base, COMPUTE) + scale * d, random, Z_DTYPE), base)
    store(z, lane, rest, new, MASKED)


@triton.jit(do_not_specialize=["n_chunks", "segments"])
def _perturb_kernel(
    z, origin, grads, sumsq, seed, chunks, table, hyper,
    n_chunks, segments, hyper_row, hyper_group, sumsq_stride, z_stride, origin_stride, grads_stride,
    Z_FLAT: tl.constexpr, Z_DTYPE: tl.constexpr, GRADS_FLAT: tl.constexpr, GRADS_DTYPE: tl.constexpr,
    SAVE: tl.constexpr, COMPUTE: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    row, segment, begin, rest, offset, group = locate(chunks, table, n_chunks)
    h = hyper + row * hyper_row + group * hyper_group
    squares = tl.load(sumsq + row * sumsq_stride)
    moves = (squares > 0) & (squares < float("inf"))
    scale = (tl.load(h + RHO) / (tl.sqrt(squares) + tl.load(h + NU))).to(COMPUTE)
    eta = tl.load(h + ETA).to(COMPUTE)
    adaptive = tl.load(h + ADAPTIVE) != 0
    z = list_base(z, row, z_stride, segment, segments, offset, begin, Z_FLAT, Z_DTYPE, ALIGNED)
    grads = list_base(grads, row, grads_stride, segment, segments, offset, begin, GRADS_FLAT, GRADS_DTYPE, ALIGNED)
    origin = field_base(origin, row, origin_stride, offset, begin, ALIGNED)
    first = None
    second = None
    if seed is not None:
        first, second = keys(tl.load(seed + row))
    place = offset + begin
    lane = tl.arange(0, BLOCK)
    if rest >= CHUNK:
        for start in tl.static_range(0, CHUNK, BLOCK):
            _perturb_block(
                z, origin, grads, start + lane, rest, scale, eta, adaptive, moves, first, second, place,
                SAVE, COMPUTE, False,
            )  # fmt: skip
    else:
        start = 0
        while start < rest:
            _perturb_block(
                z, origin, grads, start + lane, rest, scale, eta, adaptive, moves, first, second, place,
                SAVE, COMPUTE, True,
            )  # fmt: skip
            start += BLOCK


@compilable(
    "(Tensor(a!)[] z, Tensor(b!) origin, Tensor[] grads, Tensor table, Tensor hyper, Tensor sumsq, bool save, "
    "Tensor? seed=None) -> ()"
)
def perturb_(
    z: Sequence[Tensor],
    origin: Tensor,
    grads: Sequence[Tensor],
    table: Tensor,
    hyper: Tensor,
    sumsq: Tensor,
    save: bool,
    seed: Tensor | None = None,
) -> None:
    """See `reference.perturb_`."""
    call = Call(table, hyper.shape[0], origin.device, hyper)
    call.operand("z", z)
    call.operand("grads", grads)
    call.field("origin", origin)
    compute = compute_type(origin.dtype)
    seed = seed if z and z[0].dtype.itemsize == 2 else None
    scalars = {"sumsq": sumsq, "sumsq_stride": sumsq.stride(0), "seed": seed}
    call.each_chunk(_perturb_kernel, **scalars, SAVE=save, COMPUTE=compute)
    wrote(z)


@triton.jit
def _restore_block(z, origin, lane, rest, MASKED: tl.constexpr):
    Z_DTYPE: tl.constexpr = z.dtype.element_ty
    x = load(origin, lane, rest, MASKED)
    if origin.dtype.element_ty != Z_DTYPE:
        x = narrow(x, Z_DTYPE)
    store(z, lane, rest, x, MASKED)


@triton.jit(do_not_specialize=["n_chunks", "segments"])
def _restore_kernel(
    z, origin, chunks, table, n_chunks, segments, z_stride, origin_stride,
    Z_FLAT: tl.constexpr, Z_DTYPE: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    row, segment, begin, rest, offset, _ = locate(chunks, table, n_chunks)
    z = list_base(z, row, z_stride, segment, segments, offset, begin, Z_FLAT, Z_DTYPE, ALIGNED)
    origin = field_base(origin, row, origin_stride, offset, begin, ALIGNED)
    lane = tl.arange(0, BLOCK)
    if rest >= CHUNK:
        for start in tl.static_range(0, CHUNK, BLOCK):
            _restore_block(z, origin, start + lane, rest, False)
    else:
        start = 0
        while start < rest:
            _restore_block(z, origin, start + lane, rest, True)
            start += BLOCK


@compilable("(Tensor(a!)[] z, Tensor origin, Tensor table) -> ()")
def restore_(z: Sequence[Tensor], origin: Tensor, table: Tensor) -> None:
    """See `reference.restore_`."""
    call = Call(table, origin.shape[0], origin.device)
    call.operand("z", z)
    call.field("origin", origin)
    call.each_chunk(_restore_kernel)
    wrote(z)
