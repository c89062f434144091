"""Form U in Triton: `update_norm_` and `update_` of `reference`, which has the equations. The equations of the rules
are in `rules`.

There is one launch even if a rule counts steps. Every program reads its segment's count. The last program of a row
increments the counts, after all programs have read them.
"""

# The parameters of a kernel are values on the device, which have no Python type.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import triton
import triton.language as tl
from torch import Tensor

from . import reference, rules
from .constants import CLIP_EPS
from .rule import MAX_STATE, UpdateOptions, pad_state
from .triton_chunks import add_up, columns, each_block, load, locate, read, read_if, store, store_if
from .triton_common import divide, power, root
from .triton_norm import finish_row, sum_chunks_
from .triton_op import Call, compilable, compute_type, wrote
from .triton_tickets import last_of_row, tickets_of

FIELDS = tl.constexpr(MAX_STATE)
EPSILON = tl.constexpr(CLIP_EPS)
COUNT_BLOCK = tl.constexpr(128)  # segments counted at a time


@triton.jit
def _inverse(grad_scale):
    """Return `1/grad_scale` in float64, 1 without a scale."""
    return tl.full([], 1.0, tl.float64) if grad_scale is None else 1.0 / tl.load(grad_scale).to(tl.float64)


@triton.jit
def _is_running(found_inf):
    """Return False if this step only restores the weights."""
    return tl.full([], 1, tl.int1) if found_inf is None else tl.load(found_inf) == 0


@triton.jit
def _linear(grads, g1, q, a, b, elements):
    """Return `v = a*g2 + b*g1 + q`."""
    v = a * read(grads, elements)
    if g1 is not None:
        v += b * read(g1, elements)
    if q is not None:
        v += load(q, elements)
    return v


@triton.jit
def _add_squares(totals, operands, numbers, elements):
    """Return the sums plus `v^2`. Weights are read only if the clipped norm includes `phi*w`, which is added to `v`."""
    grads, g1, q, weights = operands
    a, b, phi, full = numbers
    v = _linear(grads, g1, q, a, b, elements)
    v = tl.where(full, v + phi * read_if(full, weights, elements), v)
    return (totals[0] + v * v,)


@triton.jit(do_not_specialize=["n_chunks", "segments"])
def _update_norm_kernel(
    sums, weights, grads, g1, q, grad_scale, plan, hparams, n_chunks, segments,
    COMPUTE: tl.constexpr, ALIGNED: tl.constexpr, ACCUMULATE: tl.constexpr,
):  # fmt: skip
    chunk = locate(plan, n_chunks, segments)
    h = columns(hparams, chunk)
    a = h.g2_coef * _inverse(grad_scale)
    numbers = a.to(COMPUTE), h.g1_coef.to(COMPUTE), h.prox_mu.to(COMPUTE), h.clip_includes_prox != 0
    totals = add_up(_add_squares, 1, (grads, g1, q, weights), numbers, chunk, COMPUTE, ALIGNED)
    finish_row(sums, totals, chunk, ACCUMULATE)


@compilable(reference.update_norm_, "sumsq")
def update_norm_(sumsq, params, backup, grads, table, hparams, g1=None, q=None, grad_scale=None, accumulate=False):
    """See `reference.update_norm_`."""
    weights = params if backup is None else backup
    call = Call(table, hparams.shape[0], hparams.device, hparams, weights=weights, grads=grads, g1=g1, q=q)
    sum_chunks_(_update_norm_kernel, sumsq, call, accumulate, COMPUTE=compute_type(params), grad_scale=grad_scale)


@triton.jit
def _clip_factor(h, sumsq_v, chunk):
    """Return `sig`, in float64."""
    if sumsq_v is None:
        sig = tl.full([], 1.0, tl.float64)
    else:
        sums, stride = sumsq_v
        factor = h.clip / (tl.sqrt(tl.load(sums + chunk.row * stride)) + EPSILON)
        # Not a minimum: the factor of a NaN norm is NaN, as in the reference.
        sig = tl.where((h.clip > 0) & ~(factor > 1.0), factor, 1.0)
    return sig


@triton.jit
def _form(h, sumsq_v, grad_scale, chunk, COMPUTE: tl.constexpr):
    """Return a, b, phi, sig, the coupled decay, and the factor by which a decoupled decay shrinks the weights."""
    full, is_decoupled = h.clip_includes_prox != 0, h.decoupled != 0
    a, sig = h.g2_coef * _inverse(grad_scale), _clip_factor(h, sumsq_v, chunk)
    inside = tl.where(is_decoupled, 0.0, h.decay) + tl.where(full, 0.0, h.prox_mu)
    shrink = tl.where(is_decoupled, 1.0 - h.lr * h.decay, 1.0)
    return [x.to(COMPUTE) for x in (a, h.g1_coef, h.prox_mu, sig, inside, shrink)]


@triton.jit
def _field(base, elements, INIT_STATE: tl.constexpr):
    """Return elements of a field of the state; 0 without a read if the field is absent or not set yet."""
    if base is None or INIT_STATE:
        return 0.0
    else:
        return load(base, elements)


class Step(NamedTuple):
    """The numbers of a step, and the rule."""

    form: Any
    full: Any  # true if phi*w is clipped
    rule_scalars: Any  # numbers of the rule
    run: Any
    ELEMENT: tl.constexpr
    STATE_MASK: tl.constexpr
    INIT_STATE: tl.constexpr
    WRITE_MASTER: tl.constexpr


@triton.jit
def _update(operands, step, elements):
    weights, grads, g1, q, shift, backup = operands[:6]
    state = operands[6:]
    a, b, phi, sig, decay, shrink = step.form
    w = read(weights if backup is None else backup, elements)
    v = _linear(grads, g1, q, a, b, elements)
    decay_base = w if shift is None else w - load(shift, elements)
    d = sig * tl.where(step.full, v + phi * w, v) + decay * decay_base
    fields = [_field(x, elements, step.INIT_STATE) for x in state]
    new = step.ELEMENT(w * shrink, d, fields, step.rule_scalars, step.STATE_MASK, step.INIT_STATE)
    for i in tl.static_range(FIELDS):
        if state[i] is not None:
            store_if(step.run, state[i], elements, new[i + 1])
    store(weights, elements, tl.where(step.run, new[0], w))
    if step.WRITE_MASTER and backup is not None:
        store_if(step.run, backup, elements, new[0])


@triton.jit
def _count_row(counters, chunk, table, run):
    """Count the step of each segment of the row, in the row's last program."""
    steps, row_stride, stride, tickets = counters
    if last_of_row(tickets, chunk.row, chunk.n_chunks):
        start = 0
        while start < chunk.segments:
            segment = start + tl.arange(0, COUNT_BLOCK)
            slot = tl.load(table + 4 * segment + 3, mask=segment < chunk.segments, other=0)
            counter = steps + chunk.row * row_stride + slot * stride
            mask = segment < tl.where(run, chunk.segments, 0)
            tl.store(counter, tl.load(counter, mask=mask, other=0) + 1, mask=mask)
            start += COUNT_BLOCK


@triton.jit(do_not_specialize=["n_chunks", "segments"])
def _update_kernel(
    weights, backup, grads, g1, q, shift, state0, state1, state2, counters, sumsq_v, grad_scale, found_inf,
    plan, hparams, n_chunks, segments, NUMBERS: tl.constexpr, ELEMENT: tl.constexpr, STATE_MASK: tl.constexpr,
    INIT_STATE: tl.constexpr, WRITE_MASTER: tl.constexpr, COMPUTE: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    chunk = locate(plan, n_chunks, segments)
    h = columns(hparams, chunk)
    count = 1.0
    if counters is not None:
        count = tl.load(counters[0] + chunk.row * counters[1] + chunk.slot * counters[2]) + 1
    form = _form(h, sumsq_v, grad_scale, chunk, COMPUTE)
    rule_scalars = NUMBERS(h.lr, h.rule_hparams, count, COMPUTE)
    run = _is_running(found_inf)
    each_block(
        _update, (weights, grads, g1, q, shift, backup, state0, state1, state2),
        Step(form, h.clip_includes_prox != 0, rule_scalars, run, ELEMENT, STATE_MASK, INIT_STATE, WRITE_MASTER),
        chunk, COMPUTE, ALIGNED,
    )  # fmt: skip
    if counters is not None:
        _count_row(counters, chunk, plan[1], run)


@functools.cache
def form_of(name: str) -> tuple[Any, Any]:
    """Return the rule's `numbers` and `element`, compiled by Triton.

    The rule's file is also imported without Triton, so the names of Triton that it uses are set here.
    """
    rule = rules.find(name)
    for function in (rule.scalar_args, rule.triton_update):
        function.__globals__.update(tl=tl, divide=divide, root=root, power=power)
    return triton.jit(rule.scalar_args), triton.jit(rule.triton_update)


def update_call(
    call: Call, rule: str, state: Sequence[Tensor | None], options: UpdateOptions, compute: tl.dtype
) -> partial[None]:
    """Return the launch of an update with the operands of `call`."""
    steps, sumsq_v, (numbers, element) = options.steps, options.sumsq_v, form_of(rule)
    return call.chunk_call(
        _update_kernel,
        counters=None if steps is None else (steps, *steps.stride(), tickets_of(steps, call.rows)),
        sumsq_v=None if sumsq_v is None else (sumsq_v, sumsq_v.stride(0)),
        grad_scale=options.grad_scale,
        found_inf=options.found_inf,
        NUMBERS=numbers,
        ELEMENT=element,
        STATE_MASK=sum(1 << i for i, field in enumerate(state) if field is not None),
        INIT_STATE=options.init_state,
        WRITE_MASTER=options.write_master,
        COMPUTE=compute,
    )


def update_operands(
    weights: Any, backup: Tensor | None, grads: Any, state: Sequence[Tensor | None], options: UpdateOptions
) -> dict[str, Any]:
    """Return the operands of a `Call` that updates."""
    operands = {"weights": weights, "backup": backup, "grads": grads}
    operands |= {"g1": options.g1, "q": options.q, "shift": options.shift}
    return {**operands, **{f"state{i}": field for i, field in enumerate(pad_state(state))}}


@compilable(cast("Callable[..., None]", reference.update_), "params", "backup", "steps")
def _update_(params, backup, grads, table, hparams, rule, state0, state1, state2, **options):
    state, x = (state0, state1, state2), UpdateOptions(**options)
    call = Call(table, hparams.shape[0], hparams.device, hparams, **update_operands(params, backup, grads, state, x))
    if not call.plan.n_chunks:  # no elements to update, but steps may be counted
        if x.steps is not None:
            operands = params, backup, grads, table, hparams, rule, state[: len(rules.find(rule).state)]
            reference.update_(*operands, steps=x.steps, found_inf=x.found_inf)
        return
    update_call(call, rule, state, x, compute_type(params))()
    wrote(params)


def update_(params, backup, grads, table, hparams, rule, state=(), **options):
    """See `reference.update_`."""
    _update_(params, backup, grads, table, hparams, rule, *pad_state(state), **options)
