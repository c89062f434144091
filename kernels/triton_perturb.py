"""`perturb_` and `restore_` of `reference`, which has the equations, in Triton."""

# The parameters of a kernel are values on the device, which have no Python type.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from . import reference
from .triton_chunks import columns, each_block, load, locate, read, store
from .triton_common import narrow, widen
from .triton_op import Call, compilable, compute_type, wrote


@triton.jit
def radius(sumsq, h, chunk):
    """Return `rho/(norm + nu)` in float64, and a flag that is true if the row moves."""
    sums, stride = sumsq
    squares = tl.load(sums + chunk.row * stride)
    moves = (squares > 0) & (squares < float("inf"))
    return h.rho / (tl.sqrt(squares) + h.perturb_eps), moves


@triton.jit
def mix(x, key):
    """Return `_mix` of `rounding`, in uint32."""
    x = ((x ^ (x >> 16)) * 0x7FEB352D) ^ key
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def keys(seed):
    """Return the two words of a seed (int64) from which the random bits are computed."""
    first = mix(seed.to(tl.uint32), 0x9E3779B9)
    return first, mix((seed >> 32).to(tl.uint32) ^ first, 0x85EBCA6B)


@triton.jit
def stochastic(y, random, DTYPE: tl.constexpr):
    """Return `stochastic` of `rounding`: one of the two neighbours of `y` (float32) among the numbers of `DTYPE`."""
    HALF: tl.constexpr = tl.float16 == DTYPE
    DROPPED: tl.constexpr = 13 if HALF else 16
    size = tl.abs(y)
    offset = tl.where(size < 0.00006103515625, 0.00006103515625, 0.0) if HALF else tl.zeros_like(size)
    bits = (size + offset).to(tl.uint32, bitcast=True) + (random >> (32 - DROPPED))
    result = ((bits >> DROPPED) << DROPPED).to(tl.float32, bitcast=True) - offset
    sign = y.to(tl.uint32, bitcast=True) & 0x80000000
    result = (result.to(tl.uint32, bitcast=True) | sign).to(tl.float32, bitcast=True)
    return narrow(tl.where(y == y, result, y), DTYPE)


class Perturbation(NamedTuple):
    """The numbers of a perturbation."""

    scale: Any
    moves: Any
    adaptive: Any
    eta: Any
    words: Any  # the two words of the seed; empty if the weights are rounded to nearest
    place: Any  # place of the chunk in the row
    SAVE: tl.constexpr


@triton.jit
def _perturb(operands, perturbation, elements):
    weights, backup, grads = operands
    Z_DTYPE: tl.constexpr = weights.dtype.element_ty
    if perturbation.SAVE:
        weight = load(weights, elements)
        if backup.dtype.element_ty != Z_DTYPE:
            # The master copy is valid while the weights are its rounding. A NaN equals nothing, so it is taken from the
            # weights.
            master = load(backup, elements)
            wide_weight = widen(weight, elements.COMPUTE)
            weight = tl.where(widen(narrow(master, Z_DTYPE), elements.COMPUTE) == wide_weight, master, wide_weight)
        store(backup, elements, weight)
    else:
        weight = load(backup, elements)
    w = widen(weight, elements.COMPUTE)
    d = read(grads, elements)
    t = tl.abs(w) + perturbation.eta
    d = tl.where(perturbation.adaptive, t * t * d, d)
    if len(perturbation.words) == 0:
        store(weights, elements, tl.where(perturbation.moves, w + perturbation.scale * d, w))
    else:
        base = narrow(w, Z_DTYPE)
        random = mix((perturbation.place + elements.lane).to(tl.uint32) ^ perturbation.words[0], perturbation.words[1])
        result = stochastic(widen(base, elements.COMPUTE) + perturbation.scale * d, random, Z_DTYPE)
        store(weights, elements, tl.where(perturbation.moves, result, base))


@triton.jit(do_not_specialize=["n_chunks", "segments"])
def _perturb_kernel(
    weights, backup, grads, sumsq, seed, plan, hparams, n_chunks, segments,
    SAVE: tl.constexpr, COMPUTE: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    chunk = locate(plan, n_chunks, segments)
    h = columns(hparams, chunk)
    scale, moves = radius(sumsq, h, chunk)
    words = () if seed is None else keys(tl.load(seed + chunk.row))
    place = chunk.offset + chunk.begin
    each_block(
        _perturb, (weights, backup, grads),
        Perturbation(scale.to(COMPUTE), moves, h.adaptive != 0, h.eta.to(COMPUTE), words, place, SAVE), chunk, COMPUTE,
        ALIGNED,
    )  # fmt: skip


@compilable(reference.perturb_, "params", "backup")
def perturb_(params, backup, grads, table, hparams, sumsq, save, seed=None):
    """See `reference.perturb_`."""
    call = Call(table, hparams.shape[0], backup.device, hparams, weights=params, grads=grads, backup=backup)
    seed = seed if params and params[0].dtype.itemsize == 2 else None
    if call.programs:
        perturb_call(call, sumsq, save, compute_type(params), seed)()
    wrote(params)


def perturb_call(call: Call, sumsq: Tensor, save: bool, compute: tl.dtype, seed: Tensor | None = None) -> partial[None]:
    """Return the launch of a perturbation with the operands of `call`."""
    sums = (sumsq, sumsq.stride(0))
    return call.chunk_call(_perturb_kernel, sumsq=sums, seed=seed, SAVE=save, COMPUTE=compute)


@triton.jit
def _restore(operands, numbers, elements):
    weights, backup = operands
    store(weights, elements, load(backup, elements))


@triton.jit(do_not_specialize=["n_chunks", "segments"])
def _restore_kernel(weights, backup, plan, n_chunks, segments, ALIGNED: tl.constexpr):
    chunk = locate(plan, n_chunks, segments)
    each_block(_restore, (weights, backup), (), chunk, weights.DTYPE, ALIGNED)


@compilable(reference.restore_, "params")
def restore_(params, backup, table):
    """See `reference.restore_`."""
    Call(table, backup.shape[0], backup.device, weights=params, backup=backup).each_chunk(_restore_kernel)
    wrote(params)
