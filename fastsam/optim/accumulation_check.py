"""A check for accumulated gradients: gradients that exist when `step(closure)` begins, and that it would clear."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from fastsam.optim.param_guard import Groups
from fastsam.optim.parameters import parameters_of
from fastsam.optim.sharded import to_local

_version_of = Tensor._version.__get__  # type: ignore[attr-defined]
FIRST = 4  # number of steps that are checked, because a loop accumulates in all steps or in none

MESSAGE = (
    "there were gradients when step(closure) began that no step has used. They are not part of this one: the closure "
    "is called twice, each time with gradients cleared, and makes its whole gradient. To accumulate over "
    "micro-batches, run all of them inside the closure, or call first_step(zero_grad=True) after the backward passes "
    "of all and second_step(zero_grad=True) after theirs once more. Without accumulation, leave out the backward pass "
    "before step(closure)"
)


class AccumulationCheck:
    """Check of the gradients from the end of one closure's step to the beginning of the next. It compares identities
    and versions, and keeps no gradient alive."""

    def __init__(self) -> None:
        self._steps_left = FIRST
        self._oldest: weakref.ref[Tensor] | None = None  # new tensors may have the ids of deleted ones
        self._used_grads: list[tuple[int, int]] | None = []  # None: not noted

    def reset(self) -> None:
        """Forget the known gradients, because a step failed or was made in two halves."""
        self._used_grads = None

    def record(self, groups: Groups) -> None:
        """Record the present gradients, which were all used."""
        self._used_grads = None
        if not self._steps_left:
            return
        self._steps_left -= 1
        grads = [g for p in parameters_of(groups) if (g := p.grad) is not None]
        self._oldest = weakref.ref(grads[0]) if grads else None
        self._used_grads = _marks(grads)

    def check(self, groups: Groups) -> None:
        """Warn once if there are other gradients now, which the step that begins would clear."""
        used_grads, self._used_grads = self._used_grads, None  # None until this step is made
        if used_grads is None:
            return
        grads = [g for p in parameters_of(groups) if (g := p.grad) is not None]
        fresh = self._oldest is None or self._oldest() is None
        if not grads or (not fresh and _marks(grads) == used_grads):
            return
        if any(g.layout != torch.strided or bool(to_local(g).any()) for g in grads):
            self._steps_left = 0
            warnings.warn(MESSAGE, UserWarning, stacklevel=5)


def _marks(grads: Sequence[Tensor]) -> list[tuple[int, int]]:
    return list(zip(map(id, grads), map(_version_of, grads), strict=True))
