"""torch.optim.SGD, as documented there.

m = mu*m + (1 - dampening)*d                 (`init_state`: m = d)
w <- w - lr*(d + mu*m with Nesterov, m without; d if there is no momentum)
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

MOMENTUM, DAMPENING, NESTEROV = range(FIRST_RULE_HPARAM, FIRST_RULE_HPARAM + 3)


def reference_update(
    h: Scalars, w: Tensor, d: Tensor, fields: Sequence[Tensor | None], t: Tensor, init_state: bool
) -> tuple[Tensor, ...]:
    (m_,) = fields
    if m_ is None:
        return (w - h[HParam.LR] * d,)
    mu = h[MOMENTUM]
    m = d if init_state else mu * m_ + (1 - h[DAMPENING]) * d
    d = torch.where(h[NESTEROV] != 0, d + mu * m, m)
    return w - h[HParam.LR] * d, m


def scalar_args(lr, rule_hparams, count, COMPUTE: tl.constexpr):
    mu, dampening, nesterov, _ = rule_hparams
    return lr.to(COMPUTE), mu.to(COMPUTE), (1.0 - dampening).to(COMPUTE), nesterov != 0


def triton_update(w, d, fields, numbers, STATE_MASK: tl.constexpr, INIT_STATE: tl.constexpr):
    lr, mu, grad_factor, nesterov = numbers
    m = fields[0]
    if STATE_MASK == 1:
        m = d if INIT_STATE else mu * m + grad_factor * d
        d = tl.where(nesterov, d + mu * m, m)
    return w - lr * d, m


def foreach_update(
    h: Sequence[float],
    w_: Tensors,
    d: Tensors,
    decay: float,
    fields_: Sequence[Tensors | None],
    t: Tensors | None,
    init_state: bool,
) -> None:
    if h[HParam.DECOUPLED]:
        torch._foreach_mul_(w_, 1 - h[HParam.LR] * h[HParam.DECAY])
    momenta = fields_[0] if fields_ else None
    torch._fused_sgd_(
        w_,
        d,
        momenta or [],
        weight_decay=decay,
        # With 0 torch would not write the buffer. Products with this smallest number are 0.
        momentum=(h[MOMENTUM] or 5e-324) if momenta else 0.0,
        lr=h[HParam.LR],
        dampening=h[DAMPENING],
        nesterov=h[NESTEROV] != 0,
        maximize=False,
        is_first_step=init_state,
    )


def _state_keys(group: Group) -> tuple[str, ...]:
    return () if group["momentum"] == 0 else ("momentum_buffer",)


def _initializes_in_first_step(group: Group) -> bool:
    # The buffer starts as the whole first gradient; from a buffer of zeros, dampening would take its part of it.
    return group["momentum"] != 0 and group["dampening"] != 0


RULE = UpdateRule(
    name="sgd",
    optimizer_types=(torch.optim.SGD,),
    options=("lr", "momentum", "dampening", "weight_decay", "nesterov", "maximize"),
    state=("momentum_buffer",),
    optional=("momentum_buffer",),
    rule_hparams=lambda group: (group["momentum"], group["dampening"], float(group["nesterov"])),
    reference_update=reference_update,
    scalar_args=scalar_args,
    triton_update=triton_update,
    foreach_update=foreach_update,
    state_keys=_state_keys,
    initializes_in_first_step=_initializes_in_first_step,
)
