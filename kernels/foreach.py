"""The backend of a plain install: torch's multi-tensor functions and torch's own fused optimizers, with the meaning of
`reference`.

What has no faster form is taken from the reference: half-precision weights, perturbations with a dual, inner products,
fixed-point sums, all that is compiled by torch, and on a GPU, where reading a device scalar on the host would wait for
the device, everything but norms and restoring.

Every tensor of a list is worked on by itself, whatever the rows and the threads, so a row alone has the bits that it
has in a batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from . import reference, rules
from .columns import Column
from .conventions import CLIP_EPS, refuse_freed
from .lists import Lists, Plan, Tensors, plan_of
from .reference import accumulate_ as accumulate_
from .reference import dual_norm_ as dual_norm_
from .reference import dual_perturb_ as dual_perturb_
from .reference import inner_ as inner_

WRITES_IN_PARTS = torch.float16, torch.bfloat16  # as the reference does, from which their updates are

# Elements that torch sums up in single precision, in one go on one thread: longer tensors are cut, by their length
# alone.
CHUNK = 16_384


def _serves(hyper: Tensor, *operands: Sequence[Tensor] | None) -> bool:
    """Whether all these operands are of one dtype that torch's functions compute in, where the host may read the
    scalars."""
    dtypes = {tensor.dtype for operand in operands if operand for tensor in operand[:1]}
    return (
        dtypes in ({torch.float32}, {torch.float64})
        and hyper.device.type == "cpu"
        and not torch.compiler.is_compiling()
    )


def _field(field: Tensor | None) -> list[Tensor] | None:
    return None if field is None else [field]


def _copy_(to: Tensors | None, source: Tensors | None) -> None:
    if to and source:  # torch refuses empty lists
        torch._foreach_copy_(to, source)


def norms_of(tensors: Tensors, longest: int) -> list[float]:
    """The L2 norms of these tensors, or of pieces of them; `longest`: the most elements that one has."""
    if longest < 2 * CHUNK:
        return torch.stack(torch._foreach_norm(tensors)).tolist()
    short, norms = [], []
    for t in tensors:
        cut = t.numel() // CHUNK * CHUNK if t.numel() >= 2 * CHUNK else 0
        if cut:
            norms.append(torch.linalg.vector_norm(t.as_strided((cut // CHUNK, CHUNK), (CHUNK, 1)), dim=1))
        if cut < t.numel():
            short.append(t.as_strided((t.numel() - cut,), (1,), t.storage_offset() + cut) if cut else t)
    if short:
        norms.append(torch.stack(torch._foreach_norm(short)))
    return torch.cat(norms).tolist()


def _put(sumsq: Tensor, tensors: Tensors, longest: int, accumulate: bool) -> None:
    """The sum of squares of each row, of tensors row by row."""
    rows = len(sumsq)
    count = len(tensors) // rows
    parts = [tensors[row * count : (row + 1) * count] for row in range(rows)] if rows > 1 else [tensors]
    sums = [sum([x * x for x in norms_of(part, longest)]) if part else 0.0 for part in parts]
    total = torch.tensor(sums, dtype=torch.float64, device=sumsq.device)
    sumsq.add_(total) if accumulate else sumsq.copy_(total)


def _adaptive(w: Tensors, eta: float) -> Tensors:
    """`T = |w| + eta`."""
    t = torch._foreach_abs(w)
    torch._foreach_add_(t, eta)
    return t


@torch.no_grad()
def norm_(
    sumsq: Tensor,
    grads: Sequence[Tensor],
    weights: Sequence[Tensor],
    table: Tensor,
    hyper: Tensor,
    accumulate: bool = False,
) -> None:
    """See `reference.norm_`."""
    if not _serves(hyper, grads, weights):
        return reference.norm_(sumsq, grads, weights, table, hyper, accumulate)
    plan = plan_of(table)
    lists = plan.lists(len(sumsq), grads, weights or None)
    directions = lists[0] or []
    if weights:
        directions = []
        for _, h, (g, w) in plan.parts(hyper, lists):
            if h[Column.ADAPTIVE]:
                g = torch._foreach_mul(_adaptive(w, h[Column.ETA]), g)
            directions += g
    _put(sumsq, directions, plan.longest, accumulate)


@torch.no_grad()
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
    if not _serves(hyper, z, [origin], grads):
        return reference.perturb_(z, origin, grads, table, hyper, sumsq, save, seed)
    plan, norms = plan_of(table), sumsq.sqrt().tolist()
    lists = plan.lists(len(norms), z, [origin], grads)
    perturb_lists_(plan, hyper, lists, norms, save)


def perturb_lists_(plan: Plan, hyper: Tensor, lists: Lists, norms: Sequence[float], save: bool) -> None:
    """`perturb_` of the lists z, origin and grads, with the norm of each row."""
    z_, o_, _ = lists
    if save:
        _copy_(o_, z_)
    else:
        _copy_(z_, o_)
    for row, h, (w_, _, g) in plan.parts(hyper, lists):
        if norms[row] > 0 and norms[row] < math.inf:
            if h[Column.ADAPTIVE]:
                t = _adaptive(w_, h[Column.ETA])
                torch._foreach_mul_(t, t)
                g = torch._foreach_mul(t, g)
            torch._foreach_add_(w_, g, alpha=h[Column.RHO] / (norms[row] + h[Column.NU]))


@torch.no_grad()
def restore_(z: Sequence[Tensor], origin: Tensor, table: Tensor) -> None:
    """See `reference.restore_`."""
    _copy_(*plan_of(table).lists(len(origin), z, [origin]))


def _linear(h: Sequence[float], g2: Tensors, g1: Tensors | None, q: Tensors | None, scale: float) -> Tensors:
    """`v = a*g2/scale + b*g1 + q` of the local update rule; `g2` itself where that is all."""
    v = g2 if scale == 1 else torch._foreach_div(g2, scale)
    if h[Column.A] != 1:
        v = torch._foreach_mul(v, h[Column.A])
    for term, factor in ((g1, h[Column.B]), (q, 1.0)):
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
    if not _serves(hyper, z, _field(origin), grads):
        return reference.update_norm_(sumsq, z, origin, grads, table, hyper, g1, q, grad_scale, accumulate)
    plan, scale = plan_of(table), 1.0 if grad_scale is None else grad_scale.item()
    found: list[Tensor] = []
    for _, h, (w, g, g1_, q_) in plan.parts(
        hyper, plan.lists(len(sumsq), z if origin is None else [origin], grads, g1, _field(q))
    ):
        v = _linear(h, g, g1_, q_, scale)
        found += torch._foreach_add(v, w, alpha=h[Column.PHI]) if h[Column.CLIP_FULL] else v
    _put(sumsq, found, plan.longest, accumulate)


def _clip_factor(limit: float, sumsq_v: float | None) -> float:
    """`sig`; NaN where the norm is."""
    if sumsq_v is None or not limit > 0:
        return 1.0
    factor = limit / (math.sqrt(sumsq_v) + CLIP_EPS)
    return 1.0 if factor > 1 else factor


def _gradient(
    h: Sequence[float], w: Tensors, v: Tensors, sumsq_v: float | None, shift: Tensors | None
) -> tuple[Tensors, float]:
    """`d` of `reference.update_` without `decay*w`, and that decay, which rules add themselves."""
    full, factor = h[Column.CLIP_FULL], _clip_factor(h[Column.CLIP], sumsq_v)
    if full and h[Column.PHI]:
        v = torch._foreach_add(v, w, alpha=h[Column.PHI])
    if factor != 1:
        v = torch._foreach_mul(v, factor)
    decay = (0.0 if h[Column.DECOUPLED] else h[Column.DECAY]) + (0.0 if full else h[Column.PHI])
    if decay and (shift is not None or h[Column.DECOUPLED]):
        v = torch._foreach_add(v, w if shift is None else torch._foreach_sub(w, shift), alpha=decay)
        decay = 0.0
    return v, decay


@torch.no_grad()
def update_(
    z: Sequence[Tensor],
    origin: Tensor | None,
    grads: Sequence[Tensor],
    table: Tensor,
    hyper: Tensor,
    rule: str,
    state: Sequence[Tensor | None] = (),
    *,
    steps: Tensor | None = None,
    g1: Sequence[Tensor] | None = None,
    q: Tensor | None = None,
    sumsq_v: Tensor | None = None,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
    first: bool = False,
    keep: bool = False,
    shift: Tensor | None = None,
) -> None:
    """See `reference.update_`."""
    found = rules.find(rule)
    if found.lists is None or not _serves(hyper, z, _field(origin), grads):
        options: dict[str, Any] = {"steps": steps, "g1": g1, "q": q, "sumsq_v": sumsq_v, "grad_scale": grad_scale}
        options |= {"found_inf": found_inf, "first": first, "keep": keep, "shift": shift}
        return reference.update_(z, origin, grads, table, hyper, rule, state, **options)
    plan, rows = plan_of(table), len(hyper)
    shared = z, _field(origin), grads, g1, _field(q), _field(shift)
    z_, o_, *others = plan.lists(rows, *shared, *map(_field, state))
    stops = found_inf is not None and found_inf.item() != 0
    if stops or not keep:
        _copy_(z_, o_)
    if stops:
        return None
    weights = o_ if keep and o_ else z_
    scale = 1.0 if grad_scale is None else grad_scale.item()
    sums = [None] * rows if sumsq_v is None else sumsq_v.tolist()
    counts = None if steps is None else plan.count_(steps)
    for row, h, (w_, t, g, g1_, q_, p, *fields) in plan.parts(hyper, [weights, counts, *others]):
        d, decay = _gradient(h, w_, _linear(h, g, g1_, q_, scale), sums[row], p)
        found.lists(h, w_, d, decay, fields, t, first)
    if weights is o_:
        _copy_(z_, o_)


class ListCalls:
    """The two passes of an optimizer's step on operands that were checked once, for callers as those of
    `raw_calls.RawCalls`."""

    REPEATS = False  # the calls of an update hold its gradients

    def __init__(self, z: Sequence[Tensor], origin: Tensor, table: Tensor, hyper: Tensor) -> None:
        self._operands = z, origin, table, hyper
        self._plan = plan_of(table)
        self._z, self._origin = self._plan.lists(1, z, [origin])

    @staticmethod
    def watched() -> bool:
        """False: the calls are torch's, whoever looks."""
        return False

    @torch.no_grad()
    def norm_perturb_(self, grads: Sequence[Tensor], sumsq: Tensor, adaptive: bool, save: bool = True) -> None:
        """See `raw_calls.RawCalls.norm_perturb_`."""
        refuse_freed(grads)
        z, origin, table, hyper = self._operands
        if adaptive:
            norm_(sumsq, grads, z, table, hyper)
            return perturb_(z, origin, grads, table, hyper, sumsq, save)
        g = self._plan.kept(grads)
        total = sum([x * x for x in norms_of(g, self._plan.longest)]) if g else 0.0
        sumsq.fill_(total)
        perturb_lists_(self._plan, hyper, [self._z, self._origin, g], [math.sqrt(total)], save)

    def update(
        self,
        rule: str,
        state: Sequence[Tensor | None],
        steps: Tensor | None,
        grads: Sequence[Tensor],
        first: bool,
        keep: bool,
        in_place: bool = False,
    ) -> list[partial[None]]:
        """See `raw_calls.RawCalls.update`."""
        refuse_freed(grads)
        z, origin, table, hyper = self._operands
        start = None if in_place else origin
        return [partial(update_, z, start, grads, table, hyper, rule, state, steps=steps, first=first, keep=keep)]


def raw_calls(z: Sequence[Tensor], origin: Tensor | None, table: Tensor, hyper: Tensor) -> ListCalls | None:
    """Return the two passes of a step on these operands, or None if they need the general functions, as without an
    origin."""
    return ListCalls(z, origin, table, hyper) if origin is not None and _serves(hyper, z, [origin]) else None
