"""Modules whose running statistics the second pass leaves as they are: `FusedSAM(..., model=...)`."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence

from torch import nn

from fastsam.batchnorm import Frozen, freeze, thaw

Model = nn.Module | Iterable[nn.Module]


class Statistics:
    """Freezes them from the perturbation to the end of the step. Holds no module: a model that is replaced must be seen
    to be."""

    def __init__(self, model: Model | None, frozen: Sequence[Frozen] = ()) -> None:
        """`frozen`: what was frozen already, of a copy made midway. Raises TypeError for what is no module."""
        modules = [] if model is None else [model] if isinstance(model, nn.Module) else list(_iterable(model))
        for module in modules:
            if not isinstance(module, nn.Module):
                raise TypeError(f"model must be a torch.nn.Module or several, got {module!r}")
        self._modules = [weakref.ref(module) for module in modules]
        self.frozen = list(frozen)

    @property
    def modules(self) -> list[nn.Module]:
        """Those that are still there."""
        return [module for ref in self._modules if (module := ref()) is not None]

    def freeze(self) -> None:
        """The second pass begins."""
        if self._modules and not self.frozen:
            for module in self.modules:
                self.frozen += freeze(module)

    def thaw(self) -> None:
        """It is over, whichever way; nothing when it was not under way."""
        if self.frozen:
            # A layer that was frozen twice, as a part of two modules, gets back what it had at first.
            thaw(self.frozen[::-1])
            self.frozen = []


def _iterable(model: Iterable[nn.Module]) -> Iterable[nn.Module]:
    if not isinstance(model, Iterable):
        raise TypeError(f"model must be a torch.nn.Module or several, got {model!r}")
    return model
