"""The executable specification: every kernel in plain torch, with its equation. `rounding` has stochastic rounding.

One call of a compiled kernel, here of `update_` with the rule of SGD:

    CPU:   native.update_ -> csrc/ops.cpp: update_args (checks) -> run_update -> cpu/update_loops.h -> rules/sgd.h
    CUDA:  native.update_ -> csrc/cuda/ops_cuda.cpp: update_args -> cuda/update.cu: launch_chunks   -> rules/sgd.h

Conventions of all backends:

A model is one flat index space that is cut into *segments*. A cohort of clients is several *rows* of it.

    table
        int64 `[n, 4]` on the CPU: offset in the row, length, parameter group, slot. The slot is the segment's number in
        its layout; it stays the same if a call leaves out other segments. Only the segments of the table are touched.
    list operand (`params`, `grads`, `weights`, `g1`)
        Either `n` dense tensors, one per segment, or one flat field `[rows, row_size]` that is addressed at the
        segments' offsets. A dense tensor has `rows * length` elements; if `rows > 1`, its first dimension is the row.
    field (`backup`, `momentum`, `q`, ...)
        `[rows, row_size]`, addressed at the segments' offsets. A field that is only read may have the row stride 0,
        so that all rows share one vector.
    hparams
        float64 `[rows, groups, NUM_HPARAMS]`, see `hparams`. Its first dimension is the number of rows of a call.
    sumsq
        float64 `[rows]`: a sum of squares per row.

`params`, `z` in formulas, are the weights that autograd sees. `backup` holds the unperturbed weights while `params` are
perturbed. Arithmetic runs in `compute_dtype` of their dtype: float64 for float64, otherwise float32. `backup` has their
dtype. For half-precision weights it may be float32: then it is their *master copy*, and `params` are its rounding.

Names of functions that write, and of arguments that are written, end in `_`, or are `out`.

Sources: Foret et al. 2021 (SAM, eq. 2), Kwon et al. 2021 (ASAM, eq. 9). The sources of the update rules are in `rules`.
The general local update rule covers the federated algorithms:

    d = g1 (or T^2*g1);  eps = rho*d/(||d|| + nu)
    v = a*g2 + b*g1 + q;  sig = min(1, C/(||v|| + 1e-6));  w -= lr*(sig*v + kappa*w)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from . import rules
from .constants import CLIP_EPS, FLOATS, HIGH_BITS, LIMIT, LOW_BITS, compute_dtype
from .hparams import NUM_HPARAMS, HParam
from .rounding import DROPPED, random_bits, stochastic

# Dtypes of weights for which `update_` writes state and weights one after the other, so that an interrupt may come
# between them.
WRITES_IN_PARTS = FLOATS


def segments(operand: Sequence[Tensor], table: Tensor, rows: int) -> Iterator[Tensor]:
    """Yield a view `[rows, length]` of a list operand for each segment.

    Views are in the order of memory, so channels-last tensors need no copy.
    """
    n = table.shape[0]
    for i, (offset, length, _, _) in enumerate(table.tolist()):
        tensor = operand[0] if len(operand) == 1 else operand[i]
        is_scattered = tensor.numel() == rows * length and (len(operand) == n)
        row_stride = tensor.stride(0) if rows > 1 else 0
        start = tensor.storage_offset() + (0 if is_scattered else offset)
        yield tensor.as_strided((rows, length), (row_stride, 1), start)


def _scalars(hparams: Tensor, group: int, dtype: torch.dtype) -> dict[int, Tensor]:
    """Return the columns of one group as `[rows, 1]`, which broadcast over a segment."""
    values = hparams[:, group].to(dtype)
    return {column: values[:, column : column + 1] for column in range(NUM_HPARAMS)}


def _iterate_segments(
    table: Tensor, hparams: Tensor, dtype: torch.dtype, *operands: Sequence[Tensor] | None
) -> Iterator[tuple[dict[int, Tensor], list[Any]]]:
    """Yield for each segment its scalars, and a `[rows, length]` view of each operand (None stays None)."""
    rows = hparams.shape[0]
    views = [None if operand is None else list(segments(operand, table, rows)) for operand in operands]
    for i, group in enumerate(table[:, 2].tolist()):
        yield _scalars(hparams, group, dtype), [None if view is None else view[i] for view in views]


def _field(field: Tensor | None) -> list[Tensor] | None:
    return None if field is None else [field]


def _unscale(grad: Tensor, grad_scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    grad = grad.to(dtype)
    return grad if grad_scale is None else grad / grad_scale.to(dtype)


def _scale(hparams: Tensor, group: int, sumsq: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `rho/(norm + nu)`, `[rows, 1]`, computed in float64 and then rounded, as in every backend."""
    h = _scalars(hparams, group, torch.float64)
    return (h[HParam.RHO] / (sumsq.sqrt()[:, None] + h[HParam.PERTURB_EPS])).to(dtype)


def _accumulate(out: Tensor, total: Tensor, accumulate: bool) -> None:
    out.copy_(out + total if accumulate else total)


@torch.no_grad()
def norm_(
    sumsq: Tensor,
    grads: Sequence[Tensor],
    weights: Sequence[Tensor],
    table: Tensor,
    hparams: Tensor,
    accumulate: bool = False,
) -> None:
    """Compute `sumsq[r] (+)= ||T*g||^2` over the row, with `T = |w| + eta` in adaptive groups and 1 elsewhere.

    `weights` are the unperturbed weights; the list may be empty if no group is adaptive.
    """
    dtype = compute_dtype(grads[0].dtype) if grads else torch.float32
    total = torch.zeros_like(sumsq)
    for h, (g, w) in _iterate_segments(table, hparams, dtype, grads, weights or None):
        direction = g.to(dtype)
        if w is not None:
            direction = torch.where(h[HParam.ADAPTIVE] != 0, (w.to(dtype).abs() + h[HParam.ETA]) * direction, direction)
        total += direction.square().sum(1, dtype=torch.float64)
    _accumulate(sumsq, total, accumulate)


@torch.no_grad()
def perturb_(
    params: Sequence[Tensor],
    backup: Tensor,
    grads: Sequence[Tensor],
    table: Tensor,
    hparams: Tensor,
    sumsq: Tensor,
    save: bool,
    seed: Tensor | None = None,
) -> None:
    """Compute `z = w + rho*d/(norm + nu)`, with `d = g`, or `T^2*g` in adaptive groups, and `norm = sqrt(sumsq)`.

    A row whose norm is zero or not finite is not perturbed: `z = w`, bit for bit.

    Args:
        save: if True, `w` is `params`. It is first copied to `backup`, which `restore_` and the updates read. If
            `backup` is a master copy, `w` is `backup` while `params` are its rounding, and `params` after the user has
            written the weights. If False, `w` is `backup`, and `params` are only written.
        seed: None, or int64 `[rows]` for half-precision weights. With a seed,
            `z = stochastic(round(w) + rho*d/(norm + nu))`. `round` is to nearest, and `stochastic` (see `rounding`) is
            to one of the two neighbours. Its random bits are a function of the row's seed and of the element's place in
            the row. So the mean of `z - round(w)` is the perturbation of the weights of the first gradient.
    """
    dtype = compute_dtype(backup.dtype)
    records = table[:, [0, 2]].tolist()
    for (offset, group), (h, (w_, o_, g)) in zip(
        records, _iterate_segments(table, hparams, dtype, params, [backup], grads), strict=True
    ):
        if save:
            o_.copy_(w_ if o_.dtype == w_.dtype else torch.where(o_.to(w_.dtype) == w_, o_, w_.to(o_.dtype)))
        w, direction = o_.to(dtype), g.to(dtype)
        t = w.abs() + h[HParam.ETA]
        direction = torch.where(h[HParam.ADAPTIVE] != 0, t * t * direction, direction)
        scale = _scale(hparams, group, sumsq, dtype)
        moves = (sumsq.isfinite() & (sumsq > 0))[:, None]
        if seed is None or w_.dtype not in DROPPED:
            w_.copy_(torch.where(moves, w + scale * direction, w))
            continue
        base = o_.to(w_.dtype)
        places = torch.arange(offset, offset + base.shape[1], device=base.device)
        perturbed_weights = stochastic(base.to(dtype) + scale * direction, random_bits(seed, places), w_.dtype)
        w_.copy_(torch.where(moves, perturbed_weights, base))


@torch.no_grad()
def restore_(params: Sequence[Tensor], backup: Tensor, table: Tensor) -> None:
    """Copy `backup` to `params`, bit for bit (rounded if `backup` is a master copy)."""
    rows = backup.shape[0]
    for w_, o in zip(segments(params, table, rows), segments([backup], table, rows), strict=True):
        w_.copy_(o)


def _dual_direction(h: dict[int, Tensor], g: Tensor, mu: Tensor, s: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `d = alpha*(g - mu) - s`."""
    return h[HParam.PENALTY] * (g.to(dtype) - mu.to(dtype)) - s.to(dtype)


@torch.no_grad()
def dual_norm_(
    sumsq: Tensor,
    grads: Sequence[Tensor],
    mu: Tensor,
    s: Tensor,
    table: Tensor,
    hparams: Tensor,
    accumulate: bool = False,
) -> None:
    """Compute `sumsq[r] (+)= ||d||^2` over the row, with `d = alpha*(g - mu) - s`.

    `d` is the direction of a perturbation with a dual (FedSMOO). mu and s are fields in the compute dtype; `alpha` is
    the column PENALTY.
    """
    dtype = compute_dtype(grads[0].dtype) if grads else torch.float32
    total = torch.zeros_like(sumsq)
    for h, (g, mu_, s_) in _iterate_segments(table, hparams, dtype, grads, [mu], [s]):
        total += _dual_direction(h, g, mu_, s_, dtype).square().sum(1, dtype=torch.float64)
    _accumulate(sumsq, total, accumulate)


@torch.no_grad()
def dual_perturb_(
    params: Sequence[Tensor],
    backup: Tensor,
    mu: Tensor,
    grads: Sequence[Tensor],
    s: Tensor,
    table: Tensor,
    hparams: Tensor,
    sumsq: Tensor,
    eps: Tensor | None = None,
) -> None:
    """Compute `e = rho*d/(norm + nu)` and `z = backup + e`, then the dual's step `mu += (e - s)/alpha`.

    `d` and `alpha` are as in `dual_norm_`. In a row whose norm is zero or not finite, `e = 0`, and the dual still takes
    its step. Sun, Shen, Chen, Ding and Tao, "Dynamic Regularized Sharpness Aware Minimization in Federated Learning",
    ICML 2023.

    Args:
        eps: field in the compute dtype to which `e` is written, or None.
    """
    dtype = compute_dtype(backup.dtype)
    for h, (w_, o, g, mu_, s_, e_) in _iterate_segments(
        table, hparams, dtype, params, [backup], grads, [mu], [s], _field(eps)
    ):
        scale = h[HParam.RHO] / (sumsq.sqrt().to(dtype)[:, None] + h[HParam.PERTURB_EPS])
        moves = (sumsq.isfinite() & (sumsq > 0))[:, None]
        e = scale * _dual_direction(h, g, mu_, s_, dtype)
        e = torch.where(moves, e, torch.zeros_like(e))
        w_.copy_(torch.where(moves, o.to(dtype) + e, o.to(dtype)))
        mu_.copy_(mu_ + (e - s_) / h[HParam.PENALTY])
        if e_ is not None:
            e_.copy_(e)


@torch.no_grad()
def inner_(out: Tensor, x: Sequence[Tensor], y: Sequence[Tensor], table: Tensor, accumulate: bool = False) -> None:
    """Compute `out[r] (+)= (<x, y>, <y, y>)` over the row, float64 `[rows, 2]`.

    The two numbers give the parts of `x` along and across `y`. Products and sums are in float64, because an inner
    product may be small through cancellation.

    Args:
        x, y: list operands of one dtype.
    """
    rows = out.shape[0]
    total = torch.zeros_like(out)
    for x_, y_ in zip(segments(x, table, rows), segments(y, table, rows), strict=True):
        a, b = x_.double(), y_.double()
        total += torch.stack([(a * b).sum(1), (b * b).sum(1)], dim=1)
    _accumulate(out, total, accumulate)


@torch.no_grad()
def accumulate_(
    high_: Tensor,
    low_: Tensor,
    x: Tensor,
    factor: float,
    *,
    base: Tensor | None = None,
    largest_: Tensor | None = None,
) -> None:
    """Compute `high*2^-28 + low*2^-80 += factor*d` for every row of `x`, with `d = x - base`, or `d = x`.

    The sum is over integers, so it is the same in every order. `d` is rounded to the dtype of `x`, `factor*d` to
    float64, and the result towards zero to 2^-80. Therefore the same call with `-factor` subtracts exactly the added
    number. A value that is not finite or is beyond `+-LIMIT` adds nothing. The high limb wraps if the sum is beyond
    2^35.

    Args:
        high_, low_: int64, contiguous, of one shape; `0 <= low < 2^52` afterwards.
        x: float32 or float64, of that shape, or `[rows, *that shape]` with dense rows.
        base: tensor like one row of `x`, or None.
        largest_: None, or float64 `[rows]` (`[1]`), to which the largest `|d|` of each row is written; NaN if an
            element is not finite.
    """
    rows = x[None] if x.shape == high_.shape else x
    d = rows if base is None else rows - base
    value = d.double() * (factor * 2.0**HIGH_BITS)
    value = torch.where(value.abs() <= LIMIT * 2.0**HIGH_BITS, value, 0.0)
    for row in value:  # one by one, because a sum of their low limbs may exceed 64 bits
        integer = row.trunc()
        low = low_ + ((row - integer) * 2.0**LOW_BITS).to(torch.int64)
        high_.add_(integer.to(torch.int64)).add_(low >> LOW_BITS)
        low_.copy_(low & ((1 << LOW_BITS) - 1))
    if largest_ is not None:
        flat = d.double().reshape(len(rows), high_.numel())
        largest = flat.abs().amax(1) if high_.numel() else torch.zeros_like(largest_)
        largest_.copy_(torch.where(largest.isfinite(), largest, torch.nan))


@torch.no_grad()
def update_norm_(
    sumsq: Tensor,
    params: Sequence[Tensor],
    backup: Tensor | None,
    grads: Sequence[Tensor],
    table: Tensor,
    hparams: Tensor,
    g1: Sequence[Tensor] | None = None,
    q: Tensor | None = None,
    grad_scale: Tensor | None = None,
    accumulate: bool = False,
) -> None:
    """Compute `sumsq[r] (+)= ||v||^2` with `v = a*g2 + b*g1 + q`, plus `phi*w` if CLIP_INCLUDES_PROX is set.

    Clipping limits this norm.
    """
    dtype = compute_dtype(params[0].dtype) if params else torch.float32
    total = torch.zeros_like(sumsq)
    for h, (w_, o, g, g1_, q_) in _iterate_segments(
        table, hparams, dtype, params, _field(backup), grads, g1, _field(q)
    ):
        v = _linear(h, _unscale(g, grad_scale, dtype), g1_, q_, dtype)
        w = (w_ if o is None else o).to(dtype)
        v = torch.where(h[HParam.CLIP_INCLUDES_PROX] != 0, v + h[HParam.PROX_MU] * w, v)
        total += v.square().sum(1, dtype=torch.float64)
    _accumulate(sumsq, total, accumulate)


def _linear(h: dict[int, Tensor], g2: Tensor, g1: Tensor | None, q: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return `v = a*g2 + b*g1 + q` of the local update rule."""
    v = h[HParam.G2_COEF] * g2
    if g1 is not None:
        v = v + h[HParam.G1_COEF] * g1.to(dtype)
    return v if q is None else v + q.to(dtype)


@torch.no_grad()
def update_(
    params: Sequence[Tensor],
    backup: Tensor | None,
    grads: Sequence[Tensor],
    table: Tensor,
    hparams: Tensor,
    rule: str,
    state: Sequence[Tensor | None] = (),
    *,
    steps: Tensor | None = None,
    g1: Sequence[Tensor] | None = None,
    q: Tensor | None = None,
    sumsq_v: Tensor | None = None,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
    init_state: bool = False,
    write_master: bool = False,
    shift: Tensor | None = None,
) -> None:
    """Restore and update in one pass: the local update rule, then `rule` with its gradient.

        w = backup (or params)                           the unperturbed weights
        v = a*g2 + b*g1 + q
        sig = min(1, C/(||v|| + 1e-6)), without clipping 1
        d = sig*(v + full*phi*w) + (coupled + (1 - full)*phi)*(w - shift)
        params = rule of (1 - lr*decoupled)*w and d

    If `write_master`, the new weights are also written to `backup`, before they are rounded to the dtype of `params`.

    Weight decay is either `coupled` or `decoupled` (column DECOUPLED), and the other one is 0.

    Args:
        rule: name in `rules`, such as "sgd" or "adam". The rule's file has its equation for `w` and `d`.
        state: fields of the rule, `[rows, row_size]` in the compute dtype, in the rule's order; None for a field that
            these parameters lack.
        steps: float32 `[rows, slots]`, if the rule counts steps: t per row and slot. It is incremented for the segments
            of the table, in every row.
        sumsq_v: `[rows]`, from `update_norm_`; None without clipping.
        init_state: the state is not set yet, and is only written.
        shift: field in the compute dtype, or None. With a shift, `w` is an iterate that is shifted by it, and decays
            towards the shift, not towards zero.
        grad_scale: one-element float32 tensor of a GradScaler, by which `g2` is divided.
        found_inf: one-element float32 tensor of a GradScaler. If it is not 0, the weights are restored, nothing else is
            written, and no step is counted.
    """
    update_rule = rules.find(rule)
    dtype = compute_dtype(params[0].dtype) if params else torch.float32
    stop = None if found_inf is None else found_inf.reshape(()) != 0
    padded_state = [*state, *[None] * (len(update_rule.state) - len(state))]
    vectors = params, _field(backup), grads, g1, _field(q), _field(shift)
    operands = _iterate_segments(table, hparams, dtype, *vectors, *map(_field, padded_state))
    for slot, (h, (w_, o_, g, g1_, q_, shift_, *fields)) in zip(table[:, 3].tolist(), operands, strict=True):
        t = torch.ones(hparams.shape[0], 1, dtype=torch.float64, device=hparams.device)
        if steps is not None:
            steps[:, slot] += 1 if stop is None else torch.where(stop, 0, 1).to(steps.dtype)
            t = steps[:, slot].to(torch.float64)[:, None]
        w = (w_ if o_ is None else o_).to(dtype)
        full, is_decoupled, decay = h[HParam.CLIP_INCLUDES_PROX] != 0, h[HParam.DECOUPLED] != 0, h[HParam.DECAY]
        v = _linear(h, _unscale(g, grad_scale, dtype), g1_, q_, dtype)
        inner = torch.where(full, v + h[HParam.PROX_MU] * w, v)
        inside = torch.where(is_decoupled, 0.0, decay) + torch.where(full, 0.0, h[HParam.PROX_MU])
        d = _clip_factor(h, sumsq_v, dtype) * inner + inside * (w if shift_ is None else w - shift_)
        shrunk = torch.where(is_decoupled, w * (1 - h[HParam.LR] * decay), w)
        new, *states = update_rule.reference_update(h, shrunk, d, fields, t, init_state)
        for field, value in zip(fields, states, strict=False):
            if field is not None:
                field.copy_(value if stop is None else torch.where(stop, field, value))
        _write(w_, o_, w, new, stop, write_master)


def _clip_factor(h: dict[int, Tensor], sumsq_v: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return `sig`, `[rows, 1]`."""
    limit = h[HParam.CLIP]
    if sumsq_v is None:
        return torch.ones_like(limit)
    factor = (limit / (sumsq_v.sqrt().to(dtype)[:, None] + CLIP_EPS)).clamp(max=1.0)
    return torch.where(limit > 0, factor, torch.ones_like(factor))


def _write(w_: Tensor, o_: Tensor | None, w: Tensor, new: Tensor, stop: Tensor | None, write_master: bool) -> None:
    new = new if stop is None else torch.where(stop, w, new)
    w_.copy_(new)
    if write_master and o_ is not None:
        o_.copy_(new)
