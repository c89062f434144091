"""Lion, and an optimizer class for it, because torch has none.

    c = b1*m + (1 - b1)*d;  m = b2*m + (1 - b2)*d
    w <- w - lr*sign(c)                          the decay is decoupled

Chen et al., "Symbolic Discovery of Optimization Algorithms", NeurIPS 2023, Algorithm 2.
"""

# Functions that Triton compiles have no type annotations.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..hparams import FIRST_RULE_HPARAM, HParam
from ..rule import Group, Scalars, UpdateRule
from ..tensor_lists import Tensors

if TYPE_CHECKING:
    import triton.language as tl

BETA1, BETA2 = range(FIRST_RULE_HPARAM, FIRST_RULE_HPARAM + 2)


class Lion(torch.optim.Optimizer):
    """Lion, computed tensor by tensor. As the base of `FusedSAM` it runs in fused kernels.

    Args:
        lr: learning rate, 0 or more, a number or a one-element tensor; about a tenth of AdamW's.
        betas: two numbers in [0, 1): the weight of the momentum in the direction, and its decay rate.
        weight_decay: decoupled weight decay: the weights shrink by `lr*weight_decay`; about ten times AdamW's.

    Raises:
        ValueError: an option is outside its range.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
    ) -> None:
        for name, value in (("lr", lr), ("weight_decay", weight_decay)):
            if not value >= 0:
                raise ValueError(f"{name} must be 0 or more, got {value}")
        if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"betas must be two numbers in [0, 1), got {betas}")
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step for every parameter that has a gradient.

        `closure` is called with gradients enabled, and its result is returned.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                grad = -p.grad if group["maximize"] else p.grad
                if "exp_avg" not in self.state[p]:
                    self.state[p]["exp_avg"] = torch.zeros_like(p, memory_format=torch.preserve_format)
                m = self.state[p]["exp_avg"]
                direction = (beta1 * m + (1 - beta1) * grad).sign_()
                p.mul_(1 - group["lr"] * group["weight_decay"]).sub_(group["lr"] * direction)
                m.mul_(beta2).add_(grad, alpha=1 - beta2)
        return loss


def reference_update(
    h: Scalars, w: Tensor, d: Tensor, fields: Sequence[Tensor | None], t: Tensor, init_state: bool
) -> tuple[Tensor, ...]:
    (m,) = fields
    assert m is not None
    b1, b2 = h[BETA1], h[BETA2]
    return w - h[HParam.LR] * (b1 * m + (1 - b1) * d).sign(), b2 * m + (1 - b2) * d


def scalar_args(lr, rule_hparams, count, COMPUTE: tl.constexpr):
    b1, b2, _, _ = rule_hparams
    rest1, rest2 = (1.0 - b1).to(COMPUTE), (1.0 - b2).to(COMPUTE)
    return lr.to(COMPUTE), b1.to(COMPUTE), rest1, b2.to(COMPUTE), rest2


def triton_update(w, d, fields, numbers, STATE_MASK: tl.constexpr, INIT_STATE: tl.constexpr):
    lr, b1, rest1, b2, rest2 = numbers
    c = b1 * fields[0] + rest1 * d
    sign = tl.where(c > 0, 1.0, tl.where(c < 0, -1.0, c))
    return w - lr * sign, b2 * fields[0] + rest2 * d


def foreach_update(
    h: Sequence[float],
    w_: Tensors,
    d: Tensors,
    decay: float,
    fields_: Sequence[Tensors],
    t: Tensors | None,
    init_state: bool,
) -> None:
    (m_,) = fields_
    g = torch._foreach_add(d, w_, alpha=decay) if decay else d
    c = torch._foreach_mul(m_, h[BETA1])
    torch._foreach_add_(c, g, alpha=1 - h[BETA1])
    torch._foreach_sign_(c)
    torch._foreach_mul_(w_, 1 - h[HParam.LR] * h[HParam.DECAY] * h[HParam.DECOUPLED])
    torch._foreach_add_(w_, c, alpha=-h[HParam.LR])
    torch._foreach_mul_(m_, h[BETA2])
    torch._foreach_add_(m_, g, alpha=1 - h[BETA2])


def _is_decoupled(group: Group) -> bool:
    return True


RULE = UpdateRule(
    name="lion",
    optimizer_types=(Lion,),
    options=("lr", "betas", "weight_decay", "maximize"),
    state=("exp_avg",),
    rule_hparams=lambda group: group["betas"],
    reference_update=reference_update,
    scalar_args=scalar_args,
    triton_update=triton_update,
    foreach_update=foreach_update,
    is_decoupled=_is_decoupled,
)
