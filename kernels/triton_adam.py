"""`update_adam_` of `reference`, where the equations stand, in Triton.

Two launches: one counts the steps and computes their bias corrections, one per row and segment; the other moves the weights.
"""

# The parameters of a kernel are values on the device, which have no Python type.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from .triton_call import Call, compilable, compute_type, launch, wrote
from .triton_common import (
    BETA1,
    BETA2,
    BLOCK,
    CHUNK,
    DECAY,
    EPS,
    LR,
    A,
    divide,
    field_base,
    inverse,
    limit_if,
    list_base,
    load,
    locate,
    root,
    running,
    store_if,
    widen,
    write,
)

COUNT_BLOCK = 64  # segments per program
BITS = tl.constexpr(25)  # float32 counts to 2**24


@triton.jit
def _power(base, exponent):
    """`base**exponent` in float64 for a whole exponent below 2**25, by squaring."""
    result = tl.full(base.shape, 1.0, tl.float64)
    bits = exponent.to(tl.int32)
    for _ in tl.static_range(BITS):
        result = tl.where((bits & 1) != 0, result * base, result)
        base = base * base
        bits = bits >> 1
    return result


@triton.jit(do_not_specialize=["segments", "programs_per_row"])
def _count_kernel(
    corrections, steps, found_inf, table, hyper,
    segments, programs_per_row, hyper_row, hyper_group, steps_row, steps_slot, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    row = (program // programs_per_row).to(tl.int64)
    segment = program % programs_per_row * BLOCK + tl.arange(0, BLOCK)
    mask = segment < segments
    group = tl.load(table + 4 * segment + 2, mask=mask, other=0)
    slot = tl.load(table + 4 * segment + 3, mask=mask, other=0)
    counter = steps + row * steps_row + slot * steps_slot
    count = tl.load(counter, mask=mask, other=0) + 1
    tl.store(counter, count, mask=segment < limit_if(running(found_inf), segments, True))
    h = hyper + row * hyper_row + group * hyper_group
    step_size = tl.load(h + LR) / (1.0 - _power(tl.load(h + BETA1), count))
    root_correction = tl.sqrt(1.0 - _power(tl.load(h + BETA2), count))
    pair = corrections + 2 * (row * segments + segment)
    tl.store(pair, step_size, mask=mask)
    tl.store(pair + 1, root_correction, mask=mask)


@triton.jit
def _adam_block(
    z, origin, exp_avg, exp_avg_sq, grads, lane, rest,
    a, shrink, decay, b1, rest1, b2, rest2, step_size, root_correction, eps, run,
    DECOUPLED: tl.constexpr, KEEP: tl.constexpr, MASKED: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    original = widen(load(z if origin is None else origin, lane, rest, MASKED), COMPUTE)
    grad = a * widen(load(grads, lane, rest, MASKED), COMPUTE)
    if DECOUPLED:
        w = original * shrink
    else:
        w = original
        grad += decay * original
    m = b1 * load(exp_avg, lane, rest, MASKED) + rest1 * grad
    v = b2 * load(exp_avg_sq, lane, rest, MASKED) + rest2 * grad * grad
    store_if(run, exp_avg, lane, rest, m, MASKED)
    store_if(run, exp_avg_sq, lane, rest, v, MASKED)
    new = w - divide(step_size * m, divide(root(v), root_correction) + eps)
    write(z, origin, lane, rest, original, new, run, KEEP, MASKED)


@triton.jit(do_not_specialize=["n_chunks", "segments"])
def _adam_kernel(
    z, origin, exp_avg, exp_avg_sq, grads, corrections, grad_scale, found_inf, chunks, table, hyper,
    n_chunks, segments, hyper_row, hyper_group, z_stride, origin_stride, exp_avg_stride, exp_avg_sq_stride, grads_stride,
    Z_FLAT: tl.constexpr, Z_DTYPE: tl.constexpr, GRADS_FLAT: tl.constexpr, GRADS_DTYPE: tl.constexpr,
    DECOUPLED: tl.constexpr, KEEP: tl.constexpr, COMPUTE: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    row, segment, begin, rest, offset, group = locate(chunks, table, n_chunks)
    h = hyper + row * hyper_row + group * hyper_group
    pair = corrections + 2 * (row * segments + segment)
    step_size = tl.load(pair).to(COMPUTE)
    root_correction = tl.load(pair + 1).to(COMPUTE)
    a = (tl.load(h + A) * inverse(grad_scale)).to(COMPUTE)
    decay = tl.load(h + DECAY)
    shrink = (1.0 - tl.load(h + LR) * decay).to(COMPUTE)
    decay = decay.to(COMPUTE)
    b1 = tl.load(h + BETA1)
    rest1 = (1.0 - b1).to(COMPUTE)
    b1 = b1.to(COMPUTE)
    b2 = tl.load(h + BETA2)
    rest2 = (1.0 - b2).to(COMPUTE)
    b2 = b2.to(COMPUTE)
    eps = tl.load(h + EPS).to(COMPUTE)
    run = running(found_inf)
    z = list_base(z, row, z_stride, segment, segments, offset, begin, Z_FLAT, Z_DTYPE, ALIGNED)
    grads = list_base(grads, row, grads_stride, segment, segments, offset, begin, GRADS_FLAT, GRADS_DTYPE, ALIGNED)
    exp_avg = field_base(exp_avg, row, exp_avg_stride, offset, begin, ALIGNED)
    exp_avg_sq = field_base(exp_avg_sq, row, exp_avg_sq_stride, offset, begin, ALIGNED)
    if origin is not None:
        origin = field_base(origin, row, origin_stride, offset, begin, ALIGNED)
    lane = tl.arange(0, BLOCK)
    if rest >= CHUNK:
        for start in tl.static_range(0, CHUNK, BLOCK):
            _adam_block(
                z, origin, exp_avg, exp_avg_sq, grads, start + lane, rest, a, shrink, decay, b1, rest1, b2, rest2,
                step_size, root_correction, eps, run, DECOUPLED, KEEP, False, COMPUTE,
            )  # fmt: skip
    else:
        start = 0
        while start < rest:
            _adam_block(
                z, origin, exp_avg, exp_avg_sq, grads, start + lane, rest, a, shrink, decay, b1, rest1, b2, rest2,
                step_size, root_correction, eps, run, DECOUPLED, KEEP, True, COMPUTE,
            )  # fmt: skip
            start += BLOCK


@compilable(
    "(Tensor(a!)[] z, Tensor(b!)? origin, Tensor[] grads, Tensor table, Tensor hyper, Tensor(c!) exp_avg, "
    "Tensor(d!) exp_avg_sq, Tensor(e!) steps, Tensor? grad_scale=None, Tensor? found_inf=None, "
    "bool decoupled=True, bool keep=False) -> ()"
)
def update_adam_(
    z: Sequence[Tensor],
    origin: Tensor | None,
    grads: Sequence[Tensor],
    table: Tensor,
    hyper: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    steps: Tensor,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
    decoupled: bool = True,
    keep: bool = False,
) -> None:
    """See `reference.update_adam_`."""
    if not z:
        return
    call = Call(table, hyper.shape[0], hyper.device, hyper)
    call.operand("z", z)
    call.operand("grads", grads)
    call.field("origin", origin)
    call.field("exp_avg", exp_avg)
    call.field("exp_avg_sq", exp_avg_sq)
    corrections = _count(call, hyper, steps, found_inf)
    scalars = {"corrections": corrections, "grad_scale": grad_scale, "found_inf": found_inf}
    call.each_chunk(_adam_kernel, **scalars, DECOUPLED=decoupled, KEEP=keep, COMPUTE=compute_type(z[0].dtype))
    wrote(z)


def _count(call: Call, hyper: Tensor, steps: Tensor, found_inf: Tensor | None) -> Tensor:
    """Counts the step; returns `[rows, segments, 2]`: lr over the first bias correction, the root of the second."""
    corrections = torch.empty(call.rows, call.plan.segments, 2, dtype=torch.float64, device=call.device)
    programs_per_row = triton.cdiv(call.plan.segments, COUNT_BLOCK)
    launch(
        _count_kernel,
        call.rows * programs_per_row,
        call.device,
        corrections=corrections,
        steps=steps,
        found_inf=found_inf,
        table=call.plan.table,
        hyper=hyper,
        segments=call.plan.segments,
        programs_per_row=programs_per_row,
        hyper_row=hyper.stride(0),
        hyper_group=hyper.stride(1),
        steps_row=steps.stride(0),
        steps_slot=steps.stride(1),
        BLOCK=COUNT_BLOCK,
    )
    return corrections
