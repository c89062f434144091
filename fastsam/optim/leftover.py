"""A check for accumulated gradients: gradients that exist when `step(closure)` begins, and that it would clear."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from fastsam.optim.param_guard import Groups
from fastsam.optim.parameters import parameters_of
from fastsam.optim.sharded import local

_version_of = Tensor._version.__get__  # type: ignore[attr-defined]
# The first four steps are looked at, then one of 64: a loop accumulates in all of them or in none.
FIRST, EVERY = 4, 64
# So many times gradients may be found to be zero (`zero_grad(set_to_none=False)`): reading them waits for the device.
FALSE_ALARMS = 8

MESSAGE = (
    "there were gradients when step(closure) began that no step has used. They are not part of this one: the closure "
    "is called twice, each time "
    "with gradients cleared, and makes its whole gradient. To accumulate over micro-batches, run all of them inside "
    "the closure, or call "
    "first_step(zero_grad=True) after the backward passes of all and second_step(zero_grad=True) after theirs once "
    "more. Without accumulation, "
    "leave out the backward pass before step(closure)"
)


class Leftover:
    """Watches the gradients from the end of one closure's step to the beginning of the next, by identity and version;
    keeps none alive."""

    def __init__(self) -> None:
        self._steps = 0
        self._looks = FALSE_ALARMS
        self._oldest: weakref.ref[Tensor] | None = None  # ids may be those of new tensors, when the old ones are gone
        self._used: list[tuple[int, int]] | None = []  # None: not noted

    def forget(self) -> None:
        """Forget the known gradients, because a step failed or was made in two halves."""
        self._used = None

    def note(self, groups: Groups) -> None:
        """The gradients that are there were used, all of them."""
        self._steps += 1
        if not self._looks or (self._steps >= FIRST and self._steps % EVERY):
            self._used = None
            return
        grads = [g for p in parameters_of(groups) if (g := p.grad) is not None]
        self._oldest = weakref.ref(grads[0]) if grads else None
        self._used = _marks(grads)

    def warn(self, groups: Groups) -> None:
        """Says once that there are others now, which the step that begins takes away."""
        used = self._used
        self._used = None  # until this step is made
        if used is None:
            return
        grads = [g for p in parameters_of(groups) if (g := p.grad) is not None]
        fresh = self._oldest is None or self._oldest() is None
        if not grads or (not fresh and _marks(grads) == used):
            return
        self._looks -= 1
        if any(g.layout != torch.strided or bool(local(g).any()) for g in grads):
            self._looks = 0
            warnings.warn(MESSAGE, UserWarning, stacklevel=5)


def _marks(grads: Sequence[Tensor]) -> list[tuple[int, int]]:
    return list(zip(map(id, grads), map(_version_of, grads), strict=True))
