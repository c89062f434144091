"""torch.optim.Adam and torch.optim.AdamW, as documented there, without amsgrad (AdamW: the decay is decoupled).

m = b1*m + (1 - b1)*d;  V = b2*V + (1 - b2)*d^2
w <- w - lr/(1 - b1^t) * m / (sqrt(V)/sqrt(1 - (1 - c)*b2^t) + eps)

c is the sum of the weights of earlier gradients in the first V: `1 - b2^n` after n steps, and 0 in torch's optimizers,
whose V begins at 0.
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

    from ..triton_common import divide, power, root

BETA1, BETA2, EPS, V_WEIGHT = range(FIRST_RULE_HPARAM, FIRST_RULE_HPARAM + 4)


def reference_update(
    h: Scalars, w: Tensor, d: Tensor, fields: Sequence[Tensor | None], t: Tensor, init_state: bool
) -> tuple[Tensor, ...]:
    m_, v_ = fields
    assert m_ is not None and v_ is not None
    b1, b2 = h[BETA1], h[BETA2]
    m = b1 * m_ + (1 - b1) * d
    v = b2 * v_ + (1 - b2) * d * d
    correction1 = (1 - b1.to(torch.float64) ** t).to(w.dtype)
    correction2 = (1 - (1 - h[V_WEIGHT].to(torch.float64)) * b2.to(torch.float64) ** t).to(w.dtype)
    return w - h[HParam.LR] / correction1 * m / (v.sqrt() / correction2.sqrt() + h[EPS]), m, v


def scalar_args(lr, rule_hparams, count, COMPUTE: tl.constexpr):
    b1, b2, eps, v_weight = rule_hparams
    side = tl.arange(0, 2)  # both powers side by side, so that a thread computes one of them
    powers = power(tl.where(side == 0, b1, b2), count)
    correction1 = 1.0 - tl.sum(tl.where(side == 0, powers, 0.0))
    correction2 = 1.0 - (1.0 - v_weight) * tl.sum(tl.where(side == 1, powers, 0.0))
    step_size, root_correction = (lr / correction1).to(COMPUTE), tl.sqrt(correction2).to(COMPUTE)
    rest1, rest2 = (1.0 - b1).to(COMPUTE), (1.0 - b2).to(COMPUTE)
    return b1.to(COMPUTE), rest1, b2.to(COMPUTE), rest2, step_size, root_correction, eps.to(COMPUTE)


def triton_update(w, d, fields, numbers, STATE_MASK: tl.constexpr, INIT_STATE: tl.constexpr):
    b1, rest1, b2, rest2, step_size, root_correction, eps = numbers
    m = b1 * fields[0] + rest1 * d
    v = b2 * fields[1] + rest2 * d * d
    return w - divide(step_size * m, divide(root(v), root_correction) + eps), m, v


def foreach_update(
    h: Sequence[float],
    w_: Tensors,
    d: Tensors,
    decay: float,
    fields_: Sequence[Tensors],
    t: Tensors,
    init_state: bool,
) -> None:
    (m_, v_), is_decoupled = fields_, h[HParam.DECOUPLED] != 0
    if h[V_WEIGHT]:
        _update_from_second_moments(h, w_, d, 0.0 if is_decoupled else decay, m_, v_, t)
        return
    update = torch._fused_adamw_ if is_decoupled else torch._fused_adam_
    update(
        w_,
        d,
        m_,
        v_,
        [],
        t,
        lr=h[HParam.LR],
        beta1=h[BETA1],
        beta2=h[BETA2],
        weight_decay=h[HParam.DECAY] if is_decoupled else decay,
        eps=h[EPS],
        amsgrad=False,
        maximize=False,
    )


def _update_from_second_moments(
    h: Sequence[float], w_: Tensors, d: Tensors, decay: float, m_: Tensors, v_: Tensors, t: Tensors
) -> None:
    """Update with second moments that hold earlier gradients, which torch's fused optimizers do not correct."""
    lr, b1, b2 = h[HParam.LR], h[BETA1], h[BETA2]
    d = torch._foreach_add(d, torch._foreach_mul(w_, decay))
    if h[HParam.DECOUPLED]:
        torch._foreach_mul_(w_, 1 - lr * h[HParam.DECAY])
    torch._foreach_lerp_(m_, d, 1 - b1)
    torch._foreach_mul_(v_, b2)
    torch._foreach_addcmul_(v_, d, d, 1 - b2)
    for w, m, v, step in zip(w_, m_, v_, t, strict=True):
        count = step.item()
        root_correction = (1 - (1 - h[V_WEIGHT]) * b2**count) ** 0.5
        w.addcdiv_(m, v.sqrt().div_(root_correction).add_(h[EPS]), value=-lr / (1 - b1**count))


def _is_decoupled(group: Group) -> bool:
    return bool(group["decoupled_weight_decay"])


RULE = UpdateRule(
    name="adam",
    optimizer_types=(torch.optim.Adam, torch.optim.AdamW),
    options=("lr", "betas", "eps", "weight_decay", "maximize", "amsgrad", "decoupled_weight_decay"),
    state=("exp_avg", "exp_avg_sq"),
    counter="step",
    rule_hparams=lambda group: (*group["betas"], group["eps"]),
    reference_update=reference_update,
    scalar_args=scalar_args,
    triton_update=triton_update,
    foreach_update=foreach_update,
    supports=lambda group: not group.get("amsgrad"),
    is_decoupled=_is_decoupled,
)
