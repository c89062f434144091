"""The two passes of an optimizer's step by `foreach`, on operands that were checked once: what `raw_calls` is to
`native`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from .conventions import refuse_freed
from .foreach import norm_, norms_of, perturb_, perturb_lists_, update_
from .lists import plan_of


class ListCalls:
    """The two passes of an optimizer's step on operands that were checked once, for callers as those of
    `raw_calls.RawCalls`."""

    def __init__(self, z: Sequence[Tensor], origin: Tensor, table: Tensor, hyper: Tensor) -> None:
        self._operands = z, origin, table, hyper
        self._plan = plan_of(table)
        self._z, self._origin = self._plan.lists(1, z, [origin])

    @staticmethod
    def watched() -> bool:
        """False: the calls are torch's, whoever looks."""
        return False

    @staticmethod
    def again(calls: list[partial[None]], grads: Sequence[Tensor]) -> bool:
        """False: calls have their gradients in them."""
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
