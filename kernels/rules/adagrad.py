"""torch.optim.Adagrad, as documented there.

S = S + d^2
w <- w - lr/(1 + (t - 1)*lr_decay) * d/(sqrt(S) + eps)
"""

# Functions that Triton compiles have no type annotations.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..hparams import FIRST_RULE_HPARAM, HParam
from ..rule import Scalars, UpdateRule
from ..tensor_lists import Tensors

if TYPE_CHECKING:
    import triton.language as tl

    from ..triton_common import divide, root

LR_DECAY, EPS = range(FIRST_RULE_HPARAM, FIRST_RULE_HPARAM + 2)


def reference_update(
    h: Scalars, w: Tensor, d: Tensor, fields: Sequence[Tensor | None], t: Tensor, init_state: bool
) -> tuple[Tensor, ...]:
    (sum_,) = fields
    assert sum_ is not None
    total = sum_ + d * d
    lr = (h[HParam.LR].double() / (1 + (t - 1) * h[LR_DECAY].double())).to(w.dtype)
    return w - lr * (d / (total.sqrt() + h[EPS])), total


def scalar_args(lr, rule_hparams, count, COMPUTE: tl.constexpr):
    lr_decay, eps, _, _ = rule_hparams
    return (lr / (1.0 + (count - 1).to(tl.float64) * lr_decay)).to(COMPUTE), eps.to(COMPUTE)


def triton_update(w, d, fields, numbers, STATE_MASK: tl.constexpr, INIT_STATE: tl.constexpr):
    lr, eps = numbers
    total = fields[0] + d * d
    return w - lr * divide(d, root(total) + eps), total


def foreach_update(
    h: Sequence[float],
    w_: Tensors,
    d: Tensors,
    decay: float,
    fields_: Sequence[Tensors],
    t: Tensors,
    init_state: bool,
) -> None:
    if h[HParam.DECOUPLED]:
        torch._foreach_mul_(w_, 1 - h[HParam.LR] * h[HParam.DECAY])
    (sum_,), lr, eps = fields_, h[HParam.LR], h[EPS]
    torch._fused_adagrad_(w_, d, sum_, t, lr=lr, lr_decay=h[LR_DECAY], weight_decay=decay, eps=eps, maximize=False)


RULE = UpdateRule(
    name="adagrad",
    optimizer_types=(torch.optim.Adagrad,),
    options=("lr", "lr_decay", "weight_decay", "eps", "maximize", "initial_accumulator_value"),
    state=("sum",),
    counter="step",
    rule_hparams=lambda group: (group["lr_decay"], group["eps"]),
    reference_update=reference_update,
    scalar_args=scalar_args,
    triton_update=triton_update,
    foreach_update=foreach_update,
    initial_state=lambda group: group["initial_accumulator_value"],
)
