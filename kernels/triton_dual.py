"""A perturbation with a dual in Triton: `dual_norm_` and `dual_perturb_` of `reference`, which has the equations."""

# The parameters of a kernel are values on the device, which have no Python type.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl

from . import reference
from .triton_chunks import add_up, columns, each_block, load, locate, read, store
from .triton_norm import finish_row, sum_chunks_
from .triton_op import Call, compilable, compute_type, wrote
from .triton_perturb import radius


@triton.jit
def _direction(grads, mu, s, penalty, elements):
    """Return `d = alpha*(g - mu) - s`, which is 0 beyond the segment, because all three operands are 0 there."""
    return penalty * (read(grads, elements) - mu) - s


@triton.jit
def _add_direction(totals, operands, penalty, elements):
    grads, mu, s = operands
    d = _direction(grads, load(mu, elements), load(s, elements), penalty, elements)
    return (totals[0] + d * d,)


@triton.jit(do_not_specialize=["n_chunks", "segments"])
def _dual_norm_kernel(
    sums, grads, mu, s, plan, hparams, n_chunks, segments,
    COMPUTE: tl.constexpr, ALIGNED: tl.constexpr, ACCUMULATE: tl.constexpr,
):  # fmt: skip
    chunk = locate(plan, n_chunks, segments)
    penalty = columns(hparams, chunk).penalty.to(COMPUTE)
    totals = add_up(_add_direction, 1, (grads, mu, s), penalty, chunk, COMPUTE, ALIGNED)
    finish_row(sums, totals, chunk, ACCUMULATE)


@compilable(reference.dual_norm_, "sumsq")
def dual_norm_(sumsq, grads, mu, s, table, hparams, accumulate=False):
    """See `reference.dual_norm_`."""
    call = Call(table, hparams.shape[0], sumsq.device, hparams, grads=grads, mu=mu, s=s)
    sum_chunks_(_dual_norm_kernel, sumsq, call, accumulate, COMPUTE=compute_type(grads))


@triton.jit
def _perturb(operands, numbers, elements):
    weights, backup, mu, grads, s, eps = operands
    scale, moves, penalty, inverse = numbers
    mu_, s_ = load(mu, elements), load(s, elements)
    e = tl.where(moves, scale * _direction(grads, mu_, s_, penalty, elements), 0.0)
    w = read(backup, elements)
    store(weights, elements, tl.where(moves, w + e, w))
    store(mu, elements, mu_ + (e - s_) * inverse)
    if eps is not None:
        store(eps, elements, e)


@triton.jit(do_not_specialize=["n_chunks", "segments"])
def _dual_perturb_kernel(
    weights,
    backup,
    mu,
    grads,
    s,
    eps,
    sumsq,
    plan,
    hparams,
    n_chunks,
    segments,
    COMPUTE: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    chunk = locate(plan, n_chunks, segments)
    h = columns(hparams, chunk)
    scale, moves = radius(sumsq, h, chunk)
    numbers = scale.to(COMPUTE), moves, h.penalty.to(COMPUTE), (1.0 / h.penalty).to(COMPUTE)
    each_block(_perturb, (weights, backup, mu, grads, s, eps), numbers, chunk, COMPUTE, ALIGNED)


@compilable(reference.dual_perturb_, "params", "mu", "eps")
def dual_perturb_(params, backup, mu, grads, s, table, hparams, sumsq, eps=None):
    """See `reference.dual_perturb_`."""
    fields = {"backup": backup, "mu": mu, "s": s, "eps": eps}
    call = Call(table, hparams.shape[0], backup.device, hparams, weights=params, grads=grads, **fields)
    call.each_chunk(_dual_perturb_kernel, sumsq=(sumsq, sumsq.stride(0)), COMPUTE=compute_type(params))
    wrote(params)
