"""torch.optim.Adam and torch.optim.AdamW, as documented there, without amsgrad (AdamW: the decay is decoupled).

m = b1*m + (1 - b1)*d;  V = b2*V + (1 - b2)*d^2
w <- w - lr/(1 - b1^t) * m / (sqrt(V)/sqrt(1 - b2^t) + eps)
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

BETA1, BETA2, EPS = range(FIRST_RULE_HPARAM, FIRST_RULE_HPARAM + 3)


def reference_update(
    h: Scalars, w: Tensor, d: Tensor, fields: Sequence[Tensor | None], t: Tensor, init_state: bool
) -> tuple[Tensor, ...]:
    m_, v_ = fields
    assert m_ is not None and v_ is not None
    b1, b2 = h[BETA1], h[BETA2]
    m = b1 * m_ + (1 - b1) * d
    v = b2 * v_ + (1 - b2) * d * d
    correction1 = (1 - b1.to(torch.float64) ** t).to(w.dtype)
    correction2 = (1 - b2.to(torch.float64) ** t).to(w.dtype)
    return w - h[HParam.LR] / correction1 * m / (v.sqrt() / correction2.sqrt() + h[EPS]), m, v


def scalar_args(lr, rule_hparams, count, COMPUTE: tl.constexpr):
    b1, b2, eps = rule_hparams
    side = tl.arange(0, 2)  # both powers side by side, so that a thread computes one of them
    powers = power(tl.where(side == 0, b1, b2), count)
    correction1 = 1.0 - tl.sum(tl.where(side == 0, powers, 0.0))
    correction2 = 1.0 - tl.sum(tl.where(side == 1, powers, 0.0))
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
