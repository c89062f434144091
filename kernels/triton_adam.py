"""`update_adam_` of `reference`, where the equations stand, in Triton.

One launch: every program computes the bias corrections of its segment; the last of a row counts the steps, when all have read them.
"""

# The parameters of a kernel are values on the device, which have no Python type.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from . import reference
from .triton_call import Call, compilable, compute_type, wrote
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
    list_base,
    load,
    locate,
    root,
    running,
    store_if,
    widen,
    write,
)
from .triton_tickets import last_of_row, tickets_of

COUNT_BLOCK = tl.constexpr(128)  # segments counted at a time
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


@triton.jit
def _corrections(beta1, beta2, count):
    """`1 - beta1**count` and `1 - beta2**count`; side by side, so that a thread computes one of them."""
    side = tl.arange(0, 2)
    powers = _power(tl.where(side == 0, beta1, beta2), count)
    return 1.0 - tl.sum(tl.where(side == 0, powers, 0.0)), 1.0 - tl.sum(tl.where(side == 1, powers, 0.0))


@triton.jit
def _count_row(steps, steps_slot, table, segments, run):
    """Counts the step of each of a row's segments."""
    start = 0
    while start < segments:
        segment = start + tl.arange(0, COUNT_BLOCK)
        slot = tl.load(table + 4 * segment + 3, mask=segment < segments, other=0)
        counter = steps + slot * steps_slot
        mask = segment < tl.where(run, segments, 0)
        tl.store(counter, tl.load(counter, mask=mask, other=0) + 1, mask=mask)
        start += COUNT_BLOCK


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
    z, origin, exp_avg, exp_avg_sq, grads, steps, tickets, grad_scale, found_inf, chunks, table, hyper,
    n_chunks, segments, steps_row, steps_slot, hyper_row, hyper_group, z_stride, origin_stride, exp_avg_stride, exp_avg_sq_stride, grads_stride,
    Z_FLAT: tl.constexpr, Z_DTYPE: tl.constexpr, GRADS_FLAT: tl.constexpr, GRADS_DTYPE: tl.constexpr,
    DECOUPLED: tl.constexpr, KEEP: tl.constexpr, COMPUTE: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    row, segment, begin, rest, offset, group = locate(chunks, table, n_chunks)
    h = hyper + row * hyper_row + group * hyper_group
    steps += row * steps_row
    count = tl.load(steps + tl.load(table + 4 * segment + 3) * steps_slot) + 1
    correction1, correction2 = _corrections(tl.load(h + BETA1), tl.load(h + BETA2), count)
    step_size = (tl.load(h + LR) / correction1).to(COMPUTE)
    root_correction = tl.sqrt(correction2).to(COMPUTE)
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
    if last_of_row(tickets, row, n_chunks):
        _count_row(steps, steps_slot, table, segments, run)


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
    call = Call(table, hyper.shape[0], hyper.device, hyper)
    if not call.plan.n_chunks:  # nothing to move; steps may be counted
        reference.update_adam_(
            z, origin, grads, table, hyper, exp_avg, exp_avg_sq, steps, grad_scale, found_inf, decoupled, keep
        )
        return
    call.operand("z", z)
    call.operand("grads", grads)
    call.field("origin", origin)
    call.field("exp_avg", exp_avg)
    call.field("exp_avg_sq", exp_avg_sq)
    counters = {"steps": steps, "steps_row": steps.stride(0), "steps_slot": steps.stride(1)}
    scalars = {"tickets": tickets_of(steps, call.rows), "grad_scale": grad_scale, "found_inf": found_inf}
    constants = {"DECOUPLED": decoupled, "KEEP": keep, "COMPUTE": compute_type(z[0].dtype)}
    call.each_chunk(_adam_kernel, **counters, **scalars, **constants)
    wrote(z)
