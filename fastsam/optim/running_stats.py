"""Modules whose running statistics the second pass does not update: `FusedSAM(..., model=...)`."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn

from fastsam.batchnorm import FrozenLayer, freeze, thaw

Model = nn.Module | Iterable[nn.Module]


class RunningStatsFreezer:
    """Freezes running statistics from the perturbation to the end of the step.

    It keeps no module alive, so that a replaced model is noticed.
    """

    def __init__(self, model: Model | None, frozen: Sequence[FrozenLayer] = ()) -> None:
        """Begin with the layers `frozen`, which are not empty if the optimizer is a copy that was made between the
        passes."""
        several = isinstance(model, Iterable) and not isinstance(model, nn.Module)
        modules: list[Any] = list(model) if several else [] if model is None else [model]  # type: ignore[arg-type]
        for module in modules:
            if not isinstance(module, nn.Module):
                raise TypeError(f"model must be a torch.nn.Module or several, got {module!r}")
        self._modules = [weakref.ref(module) for module in modules]
        self.frozen = list(frozen)

    @property
    def modules(self) -> list[nn.Module]:
        """The modules that still exist."""
        return [module for ref in self._modules if (module := ref()) is not None]

    def freeze(self) -> None:
        """Freeze the statistics, because the second pass begins."""
        if self._modules and not self.frozen:
            for module in self.modules:
                self.frozen += freeze(module)

    def thaw(self) -> None:
        """Update the statistics again, because the second pass is over."""
        if self.frozen:
            # A layer that was frozen twice, as a part of two modules, gets back what it had at first.
            thaw(self.frozen[::-1])
            self.frozen = []
