"""bSAM's update, and `BayesNewton`, the optimizer of that name.

    m = b1*m + (1 - b1)*d;  s = b2*s + (1 - b2)*(sqrt(s)*|g1| + delta + gamma)
    w <- w - lr * m/s                           the decay is coupled: d = g2 + delta*w

g1, the gradient at a sampled point, is read as a third field. s begins as a positive number.

Moellenhoff and Khan, "SAM as an Optimal Relaxation of Bayes", ICLR 2023 (the algorithm of bSAM, its last three lines).
"""

# What Triton compiles has no types.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from numbers import Real
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..columns import OWN, Column
from ..lists import Tensors
from ..rule import Group, Rule, Scalars

if TYPE_CHECKING:
    import triton.language as tl

    from ..triton_common import divide, root

BETA1, BETA2, FLOOR = range(OWN, OWN + 3)


class BayesNewton(torch.optim.Optimizer):
    """The update of bSAM, tensor by tensor: what `FusedSAM(..., sam=BSAM(...))` has as its base, fused. By itself g1
    and g2 are one gradient g.

        m <- b1*m + (1 - b1)*(g2 + weight_decay*w),   m = 0 before the first step
        s <- b2*s + (1 - b2)*(sqrt(s)*|g1| + weight_decay + damping)
        w <- w - lr * m/s

    Moellenhoff and Khan, "SAM as an Optimal Relaxation of Bayes", ICLR 2023. State: m (`exp_avg`) and s (`scale`);
    1/(N*s) is the variance of each weight, N the number of training samples.

    lr
        0 or more, a number or a one-element tensor; as of SGD, since m/s is a Newton step.
    betas
        two numbers in [0, 1): of m and of s.
    weight_decay
        delta of the paper, 0 or more: the precision of the prior, over N. A number.
    damping
        gamma of the paper, above 0, which keeps s from 0. A number.
    scale
        what s begins as, above 0.

    Raises ValueError for options outside these ranges.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 0.1,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        damping: float = 0.1,
        scale: float = 1.0,
        *,
        maximize: bool = False,
    ) -> None:
        for name, value in (("lr", lr), ("weight_decay", weight_decay)):
            if not value >= 0:
                raise ValueError(f"{name} must be 0 or more, got {value}")
        for name, value in (("damping", damping), ("scale", scale)):
            if not 0 < value < math.inf:
                raise ValueError(f"{name} must be above 0 and finite, got {value}")
        if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"betas must be two numbers in [0, 1), got {betas}")
        options = {"lr": lr, "betas": betas, "weight_decay": weight_decay, "damping": damping, "scale": scale}
        super().__init__(params, {**options, "maximize": maximize})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of every parameter that has a gradient. Returns what `closure` returns, called with gradients
        enabled."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state, decay = self.state[p], group["weight_decay"]
                if "scale" not in state:
                    state["exp_avg"] = torch.zeros_like(p, memory_format=torch.preserve_format)
                    state["scale"] = torch.full_like(p, group["scale"], memory_format=torch.preserve_format)
                m, s = state["exp_avg"], state["scale"]
                d = (-p.grad if group["maximize"] else p.grad) + decay * p
                curvature = s.sqrt() * p.grad.abs() + (decay + group["damping"])
                m.mul_(beta1).add_(d, alpha=1 - beta1)
                s.mul_(beta2).add_(curvature, alpha=1 - beta2)
                p.sub_(group["lr"] * (m / s))
        return loss


def step(
    h: Scalars, w: Tensor, d: Tensor, fields: Sequence[Tensor | None], t: Tensor, first: bool
) -> tuple[Tensor, ...]:
    m_, s_, g1 = fields
    assert m_ is not None and s_ is not None and g1 is not None
    b1, b2 = h[BETA1], h[BETA2]
    m = b1 * m_ + (1 - b1) * d
    s = b2 * s_ + (1 - b2) * (s_.sqrt() * g1.abs() + h[FLOOR])
    return w - h[Column.LR] * (m / s), m, s, g1


def numbers(lr, own, count, COMPUTE: tl.constexpr):
    b1, b2, floor = own
    rest1, rest2 = (1.0 - b1).to(COMPUTE), (1.0 - b2).to(COMPUTE)
    return lr.to(COMPUTE), b1.to(COMPUTE), rest1, b2.to(COMPUTE), rest2, floor.to(COMPUTE)


def element(w, d, fields, numbers, GIVEN: tl.constexpr, FIRST: tl.constexpr):
    lr, b1, rest1, b2, rest2, floor = numbers
    m = b1 * fields[0] + rest1 * d
    s = b2 * fields[1] + rest2 * (root(fields[1]) * tl.abs(fields[2]) + floor)
    return w - lr * divide(m, s), m, s, fields[2]


def lists(
    h: Sequence[float],
    w_: Tensors,
    d: Tensors,
    decay: float,
    fields_: Sequence[Tensors],
    t: Tensors | None,
    first: bool,
) -> None:
    (m_, s_, g1), b1, b2 = fields_, h[BETA1], h[BETA2]
    g = torch._foreach_add(d, w_, alpha=decay) if decay else d
    torch._foreach_mul_(m_, b1)
    torch._foreach_add_(m_, g, alpha=1 - b1)
    curvature = torch._foreach_sqrt(s_)
    torch._foreach_mul_(curvature, torch._foreach_abs(g1))
    torch._foreach_add_(curvature, h[FLOOR])
    torch._foreach_mul_(s_, b2)
    torch._foreach_add_(s_, curvature, alpha=1 - b2)
    if h[Column.DECOUPLED]:
        torch._foreach_mul_(w_, 1 - h[Column.LR] * h[Column.DECAY])
    torch._foreach_addcdiv_(w_, m_, s_, value=-h[Column.LR])


def _own(group: Group) -> tuple[float, ...]:
    added = []
    for name in ("weight_decay", "damping"):  # a sum of tensors would not follow them
        if not isinstance(group[name], Real):
            raise TypeError(f"{name} of BayesNewton must be a number, got {type(group[name]).__name__}")
        added.append(float(group[name]))
    return (*group["betas"], sum(added))


RULE = Rule(
    name="bsam",
    serves=(BayesNewton,),
    options=("lr", "betas", "weight_decay", "damping", "scale", "maximize"),
    state=("exp_avg", "scale", "first_gradient"),
    beside="first_gradient",
    own=_own,
    step=step,
    numbers=numbers,
    element=element,
    lists=lists,
    kept=lambda group: ("exp_avg", "scale"),
    start=lambda group: (0.0, group["scale"]),
)
