"""torch.optim.RMSprop, as documented there, with momentum and `centered`.

    V = alpha*V + (1 - alpha)*d^2;  variance = V, or centered: M = alpha*M + (1 - alpha)*d,  variance = V - M^2
    e = d/(sqrt(variance) + eps);   with momentum: b = mu*b + e, and e = b
    w <- w - lr*e

A variance that rounding makes negative is 0 (torch's is then NaN).
"""

# Functions that Triton compiles have no type annotations.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..hparams import FIRST_RULE_HPARAM, HParam
from ..rule import Group, Scalars, UpdateRule
from ..tensor_lists import Tensors

if TYPE_CHECKING:
    import triton.language as tl

    from ..triton_common import divide, root

ALPHA, EPS, MOMENTUM = range(FIRST_RULE_HPARAM, FIRST_RULE_HPARAM + 3)


def reference_update(
    h: Scalars, w: Tensor, d: Tensor, fields: Sequence[Tensor | None], t: Tensor, first: bool
) -> tuple[Tensor, ...]:
    v_, m_, mean_ = fields
    assert v_ is not None
    alpha = h[ALPHA]
    v = alpha * v_ + (1 - alpha) * d * d
    variance, mean, m = v, d, d
    if mean_ is not None:
        mean = alpha * mean_ + (1 - alpha) * d
        variance = (v - mean * mean).clamp(min=0)
    e = d / (variance.sqrt() + h[EPS])
    if m_ is not None:
        m = e = h[MOMENTUM] * m_ + e
    return w - h[HParam.LR] * e, v, m, mean


def scalar_args(lr, rule_hparams, count, COMPUTE: tl.constexpr):
    alpha, eps, mu, _ = rule_hparams
    return lr.to(COMPUTE), alpha.to(COMPUTE), (1.0 - alpha).to(COMPUTE), eps.to(COMPUTE), mu.to(COMPUTE)


def triton_update(w, d, fields, numbers, STATE_MASK: tl.constexpr, INIT_STATE: tl.constexpr):
    lr, alpha, one_minus_alpha, eps, mu = numbers
    v = alpha * fields[0] + one_minus_alpha * d * d
    mean, variance = d, v
    if STATE_MASK & 4:
        mean = alpha * fields[2] + one_minus_alpha * d
        variance = v - mean * mean
        variance = tl.where(variance < 0, 0.0, variance)
    e = divide(d, root(variance) + eps)
    if STATE_MASK & 2:
        e = mu * fields[1] + e
    return w - lr * e, v, e, mean


def foreach_update(
    h: Sequence[float],
    w_: Tensors,
    d: Tensors,
    decay: float,
    fields_: Sequence[Tensors | None],
    t: Tensors | None,
    first: bool,
) -> None:
    v_, m_, mean_ = fields_
    assert v_ is not None
    alpha = h[ALPHA]
    g = torch._foreach_add(d, w_, alpha=decay) if decay else d
    torch._foreach_mul_(v_, alpha)
    torch._foreach_addcmul_(v_, g, g, value=1 - alpha)
    e: Tensors = v_
    if mean_ is not None:
        torch._foreach_mul_(mean_, alpha)
        torch._foreach_add_(mean_, g, alpha=1 - alpha)
        e = torch._foreach_addcmul(v_, mean_, mean_, value=-1)
        torch._foreach_clamp_min_(e, 0.0)
    e = torch._foreach_sqrt(e)
    torch._foreach_add_(e, h[EPS])
    e = torch._foreach_div(g, e)
    if m_ is not None:
        torch._foreach_mul_(m_, h[MOMENTUM])
        torch._foreach_add_(m_, e)
        e = m_
    if h[HParam.DECOUPLED]:
        torch._foreach_mul_(w_, 1 - h[HParam.LR] * h[HParam.DECAY])
    torch._foreach_add_(w_, e, alpha=-h[HParam.LR])


def _state_keys(group: Group) -> tuple[str, ...]:
    momentum, centered = ("momentum_buffer",) * (group["momentum"] > 0), ("grad_avg",) * bool(group["centered"])
    return ("square_avg", *momentum, *centered)


RULE = UpdateRule(
    name="rmsprop",
    optimizer_types=(torch.optim.RMSprop,),
    options=("lr", "momentum", "alpha", "eps", "centered", "weight_decay", "maximize"),
    state=("square_avg", "momentum_buffer", "grad_avg"),
    optional=("momentum_buffer", "grad_avg"),
    counter="step",
    rule_hparams=lambda group: (group["alpha"], group["eps"], group["momentum"]),
    reference_update=reference_update,
    scalar_args=scalar_args,
    triton_update=triton_update,
    foreach_update=foreach_update,
    state_keys=_state_keys,
)
