"""The backend of an installation without compiled kernels: torch's multi-tensor functions and fused optimizers, with
the meaning of `reference`.

Cases that have no faster form use the reference: half-precision weights, perturbations with a dual, inner products,
fixed-point sums, and calls compiled by torch. On a GPU, reading a device scalar on the host would wait for the device,
so everything except norms and restoring uses the reference.

Every tensor of a list is computed separately, for any number of rows and threads. So a row has the same bits in a batch
and without other rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from . import reference, rules
from .constants import CLIP_EPS, check_not_freed
from .hparams import HParam
from .reference import accumulate_ as accumulate_
from .reference import dual_norm_ as dual_norm_
from .reference import dual_perturb_ as dual_perturb_
from .reference import inner_ as inner_
from .rule import UpdateOptions
from .tensor_lists import Lists, TensorLists, Tensors, tensor_lists_of

WRITES_IN_PARTS = torch.float16, torch.bfloat16  # their updates are made by the reference, in parts

# Largest number of elements that torch adds up in single precision in one pass on one thread. Longer tensors are cut at
# positions that depend only on their length.
CHUNK = 16_384


def _serves(hparams: Tensor, *operands: Sequence[Tensor] | None) -> bool:
    """Return True if torch's functions can compute with these operands: float32 or float64, with scalars on the CPU."""
    dtypes = {tensor.dtype for operand in operands if operand for tensor in operand[:1]}
    return (
        dtypes in ({torch.float32}, {torch.float64})
        and hparams.device.type == "cpu"
        and not torch.compiler.is_compiling()
    )


def _field(field: Tensor | None) -> list[Tensor] | None:
    return None if field is None else [field]


def _copy_(target: Tensors | None, source: Tensors | None) -> None:
    if target and source:  # torch refuses empty lists
        torch._foreach_copy_(target, source)


def norms_of(tensors: Tensors, longest: int) -> list[float]:
    """Return the L2 norms of these tensors, or of their pieces. `longest`: number of elements of the longest tensor."""
    if longest < 2 * CHUNK:
        return torch.stack(torch._foreach_norm(tensors)).tolist()
    short, norms = [], []
    for t in tensors:
        end = t.numel() // CHUNK * CHUNK if t.numel() >= 2 * CHUNK else 0
        if end:
            norms.append(torch.linalg.vector_norm(t.as_strided((end // CHUNK, CHUNK), (CHUNK, 1)), dim=1))
        if end < t.numel():
            short.append(t.as_strided((t.numel() - end,), (1,), t.storage_offset() + end) if end else t)
    if short:
        norms.append(torch.stack(torch._foreach_norm(short)))
    return torch.cat(norms).tolist()


def _store(sumsq: Tensor, tensors: Tensors, longest: int, accumulate: bool) -> None:
    """Write or add the sum of squares of each row. `tensors` has the tensors row by row."""
    rows = len(sumsq)
    count = len(tensors) // rows
    starts = range(0, rows * count, count) if count else [0] * rows
    if longest < 2 * CHUNK and tensors:  # one norm for each tensor
        norms = norms_of(tensors, longest)
        parts = [norms[i : i + count] for i in starts]
    else:
        parts = [norms_of(part, longest) if (part := tensors[i : i + count]) else [] for i in starts]
    sums = [sum([x * x for x in part]) for part in parts]
    total = torch.tensor(sums, dtype=torch.float64, device=sumsq.device)
    sumsq.add_(total) if accumulate else sumsq.copy_(total)


def _adaptive(w: Tensors, eta: float) -> Tensors:
    """Return `T = |w| + eta`."""
    t = torch._foreach_abs(w)
    torch._foreach_add_(t, eta)
    return t


@torch.no_grad()
def norm_(
    sumsq: Tensor,
    grads: Sequence[Tensor],
    weights: Sequence[Tensor],
    table: Tensor,
    hparams: Tensor,
    accumulate: bool = False,
) -> None:
    """See `reference.norm_`."""
    if not _serves(hparams, grads, weights):
        return reference.norm_(sumsq, grads, weights, table, hparams, accumulate)
    plan = tensor_lists_of(table)
    lists = plan.lists(len(sumsq), grads, weights or None)
    directions = lists[0] or []
    if weights:
        directions = []
        for _, h, (g, w) in plan.parts(hparams, lists):
            if h[HParam.ADAPTIVE]:
                g = torch._foreach_mul(_adaptive(w, h[HParam.ETA]), g)
            directions += g
    _store(sumsq, directions, plan.longest, accumulate)


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
    """See `reference.perturb_`."""
    if not _serves(hparams, params, [backup], grads):
        return reference.perturb_(params, backup, grads, table, hparams, sumsq, save, seed)
    plan, norms = tensor_lists_of(table), sumsq.sqrt().tolist()
    lists = plan.lists(len(norms), params, [backup], grads)
    perturb_lists_(plan, hparams, lists, norms, save)


def perturb_lists_(plan: TensorLists, hparams: Tensor, lists: Lists, norms: Sequence[float], save: bool) -> None:
    """Compute `perturb_` of the lists params, backup and grads, with the norm of each row."""
    params_, o_, _ = lists
    if save:
        _copy_(o_, params_)
    else:
        _copy_(params_, o_)
    for row, h, (w_, _, g) in plan.parts(hparams, lists):
        if norms[row] > 0 and norms[row] < math.inf:
            if h[HParam.ADAPTIVE]:
                t = _adaptive(w_, h[HParam.ETA])
                torch._foreach_mul_(t, t)
                g = torch._foreach_mul(t, g)
            torch._foreach_add_(w_, g, alpha=h[HParam.RHO] / (norms[row] + h[HParam.PERTURB_EPS]))


@torch.no_grad()
def restore_(params: Sequence[Tensor], backup: Tensor, table: Tensor) -> None:
    """See `reference.restore_`."""
    _copy_(*tensor_lists_of(table).lists(len(backup), params, [backup]))


def _linear(h: Sequence[float], g2: Tensors, g1: Tensors | None, q: Tensors | None, scale: float) -> Tensors:
    """Return `v = a*g2/scale + b*g1 + q` of the local update rule, or `g2` itself if no other term changes it."""
    v = g2 if scale == 1 else torch._foreach_div(g2, scale)
    if h[HParam.G2_COEF] != 1:
        v = torch._foreach_mul(v, h[HParam.G2_COEF])
    for term, factor in ((g1, h[HParam.G1_COEF]), (q, 1.0)):
        if term is None:
            continue
        if v is g2:
            v = torch._foreach_add(v, term, alpha=factor)
        else:
            torch._foreach_add_(v, term, alpha=factor)
    return v


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
    """See `reference.update_norm_`."""
    if not _serves(hparams, params, _field(backup), grads):
        return reference.update_norm_(sumsq, params, backup, grads, table, hparams, g1, q, grad_scale, accumulate)
    plan, scale = tensor_lists_of(table), 1.0 if grad_scale is None else grad_scale.item()
    norms: list[Tensor] = []
    for _, h, (w, g, g1_, q_) in plan.parts(
        hparams, plan.lists(len(sumsq), params if backup is None else [backup], grads, g1, _field(q))
    ):
        v = _linear(h, g, g1_, q_, scale)
        norms += torch._foreach_add(v, w, alpha=h[HParam.PROX_MU]) if h[HParam.CLIP_INCLUDES_PROX] else v
    _store(sumsq, norms, plan.longest, accumulate)


def _clip_factor(limit: float, sumsq_v: float | None) -> float:
    """Return `sig`; NaN if the norm is NaN."""
    if sumsq_v is None or not limit > 0:
        return 1.0
    factor = limit / (math.sqrt(sumsq_v) + CLIP_EPS)
    return 1.0 if factor > 1 else factor


def _gradient(
    h: Sequence[float], w: Tensors, v: Tensors, sumsq_v: float | None, shift: Tensors | None
) -> tuple[Tensors, float]:
    """Return `d` of `reference.update_` without `decay*w`, and that decay, which rules add themselves."""
    full, factor = h[HParam.CLIP_INCLUDES_PROX], _clip_factor(h[HParam.CLIP], sumsq_v)
    if full and h[HParam.PROX_MU]:
        v = torch._foreach_add(v, w, alpha=h[HParam.PROX_MU])
    if factor != 1:
        v = torch._foreach_mul(v, factor)
    decay = (0.0 if h[HParam.DECOUPLED] else h[HParam.DECAY]) + (0.0 if full else h[HParam.PROX_MU])
    if decay and (shift is not None or h[HParam.DECOUPLED]):
        v = torch._foreach_add(v, w if shift is None else torch._foreach_sub(w, shift), alpha=decay)
        decay = 0.0
    return v, decay


@torch.no_grad()
def update_(
    params: Sequence[Tensor],
    backup: Tensor | None,
    grads: Sequence[Tensor],
    table: Tensor,
    hparams: Tensor,
    rule: str,
    state: Sequence[Tensor | None] = (),
    **options: Any,
) -> None:
    """See `reference.update_`."""
    update_rule, x = rules.find(rule), UpdateOptions(**options)
    if update_rule.foreach_update is None or not _serves(hparams, params, _field(backup), grads):
        return reference.update_(params, backup, grads, table, hparams, rule, state, **options)
    plan, rows = tensor_lists_of(table), len(hparams)
    vectors = params, _field(backup), grads, x.g1, _field(x.q), _field(x.shift)
    params_, o_, *lists = plan.lists(rows, *vectors, *map(_field, state))
    stops = x.found_inf is not None and x.found_inf.item() != 0
    if stops or not x.write_master:
        _copy_(params_, o_)
    if stops:
        return None
    weights = o_ if x.write_master and o_ else params_
    scale = 1.0 if x.grad_scale is None else x.grad_scale.item()
    sums = [None] * rows if x.sumsq_v is None else x.sumsq_v.tolist()
    counts = None if x.steps is None else plan.count_(x.steps)
    for row, h, (w_, t, g, g1_, q_, p, *fields) in plan.parts(hparams, [weights, counts, *lists], x.sumsq_v is None):
        d, decay = _gradient(h, w_, _linear(h, g, g1_, q_, scale), sums[row], p)
        update_rule.foreach_update(h, w_, d, decay, fields, t, x.init_state)
    if weights is o_:
        _copy_(params_, o_)


class ListCalls:
    """The two passes of a step on operands that were checked once. It has the methods of `DirectCalls`."""

    REPEATS = False  # the calls of an update hold its gradients

    def __init__(self, params: Sequence[Tensor], backup: Tensor, table: Tensor, hparams: Tensor) -> None:
        self._operands = params, backup, table, hparams
        self._plan = tensor_lists_of(table)
        self._params, self._backup = self._plan.lists(1, params, [backup])

    @staticmethod
    def is_watched() -> bool:
        """Return False: the calls go through torch's dispatcher."""
        return False

    @torch.no_grad()
    def norm_perturb_(self, grads: Sequence[Tensor], sumsq: Tensor, adaptive: bool, save: bool = True) -> None:
        """See `direct_calls.DirectCalls.norm_perturb_`."""
        check_not_freed(grads)
        params, backup, table, hparams = self._operands
        if adaptive:
            norm_(sumsq, grads, params, table, hparams)
            return perturb_(params, backup, grads, table, hparams, sumsq, save)
        g = self._plan.nonempty(grads)
        total = sum([x * x for x in norms_of(g, self._plan.longest)]) if g else 0.0
        sumsq.fill_(total)
        perturb_lists_(self._plan, hparams, [self._params, self._backup, g], [math.sqrt(total)], save)

    def update(
        self, rule: str, state: Sequence[Tensor | None], grads: Sequence[Tensor], in_place: bool = False, **options: Any
    ) -> list[partial[None]]:
        """See `direct_calls.DirectCalls.update`."""
        check_not_freed(grads)
        params, backup, table, hparams = self._operands
        start = None if in_place else backup
        return [partial(update_, params, start, grads, table, hparams, rule, state, **options)]


def direct_calls(params: Sequence[Tensor], backup: Tensor | None, table: Tensor, hparams: Tensor) -> ListCalls | None:
    """Return the two passes of a step on these operands, or None if they need the general functions."""
    if backup is None or not _serves(hparams, params, [backup]):
        return None
    return ListCalls(params, backup, table, hparams)
