"""The modules of `FusedSAM(..., model=...)`.

The second pass does not update their running statistics. With a variant of one pass their `train()` and `eval()` move
the weights.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

from fastsam.batchnorm import FrozenLayer, freeze, thaw
from fastsam.optim.parameters import parameters_of
from fastsam.optim.tensor_table import Groups

NO_MODEL = (
    "a BatchNorm layer of this model updates its running statistics in the second pass too, at the perturbed weights. "
    "Pass the model to the optimizer, FusedSAM(..., model=model), so that statistics come only from the first pass"
)
Model = nn.Module | Iterable[nn.Module]


class RunningStatsFreezer:
    """Freezes running statistics from the perturbation to the end of the step.

    It keeps no module alive, so that a replaced model is noticed.
    """

    def __init__(self, model: Model | None, frozen: Sequence[FrozenLayer] = ()) -> None:
        """Begin with the layers `frozen`, which are not empty if the optimizer is a copy that was made between the
        passes."""
        several = isinstance(model, Iterable) and not isinstance(model, (nn.Module, str))
        modules: list[Any] = list(model) if several else [] if model is None else [model]  # type: ignore[arg-type]
        for module in modules:
            if not isinstance(module, nn.Module):
                raise TypeError(f"model must be a torch.nn.Module or several, got {module!r}")
        self._modules = [weakref.ref(module) for module in modules]
        self.frozen = list(frozen)
        self._watch: BatchNormWatch | None = None if self._modules else BatchNormWatch()

    @property
    def modules(self) -> list[nn.Module]:
        """The modules that still exist."""
        return [module for ref in self._modules if (module := ref()) is not None]

    def follow(self, optimizer: Any) -> None:
        """Let `train()` and `eval()` of the modules call the methods of a `FusedSAM`, too."""
        for module in self.modules:
            object.__setattr__(module, "train", _Train(module, optimizer))

    def freeze(self, groups: Groups) -> None:
        """Freeze the statistics, because the second pass begins. Without a model, watch for layers that have some."""
        if self._watch is not None:
            self._watch.begin(groups)
        if self._modules and not self.frozen:
            for module in self.modules:
                self.frozen += freeze(module)

    def thaw(self) -> None:
        """Update the statistics again, because the second pass is over."""
        if self._watch is not None:
            self._watch.end()
            self._watch = None  # because every step has the same layers
        if self.frozen:
            # A layer that was frozen twice, as a part of two modules, gets back what it had at first.
            thaw(self.frozen[::-1])
            self.frozen = []


class BatchNormWatch:
    """Warns once if a BatchNorm layer with parameters of the optimizer runs in the second pass of the first step.

    Modules call a global hook, and only in this one pass, because the optimizer knows parameters and no modules. The
    hook keeps no watch alive, and ends with it when an optimizer is dropped between the passes.
    """

    def __init__(self) -> None:
        self._handle: RemovableHandle | None = None
        self._end: weakref.finalize[[], Any] | None = None
        self._params: set[int] = set()

    def begin(self, groups: Groups) -> None:
        """Begin to watch the modules that are called. A compiled step, which would trace the hook, is not watched."""
        if self._handle is None and not torch.compiler.is_compiling():
            self._params = {id(p) for p in parameters_of(groups) if p.dim() == 1}
            if self._params:
                self._handle = register_module_forward_pre_hook(_hook_of(weakref.ref(self)))
                self._end = weakref.finalize(self, self._handle.remove)
                self._end.atexit = False

    def check(self, module: nn.Module) -> None:
        """Warn if `module` writes statistics. A momentum of 0, as in loops that freeze layers by hand, writes none."""
        writes = isinstance(module, _BatchNorm) and module.training and module.track_running_stats
        if writes and module.momentum != 0 and id(module.weight) in self._params:
            self.end()
            warnings.warn(NO_MODEL, UserWarning, stacklevel=2)

    def end(self) -> None:
        """End the watch, also without a `begin`."""
        if self._end is not None:
            self._end()
            self._handle = self._end = None


def _hook_of(reference: weakref.ref[BatchNormWatch]) -> Callable[[nn.Module, Any], None]:
    """Return the hook of a watch, to which it has only a weak reference."""

    def hook(module: nn.Module, inputs: Any) -> None:
        watch = reference()
        if watch is not None:
            watch.check(module)

    return hook


class _Train:
    """Replacement of `module.train`, which `module.eval()` calls too.

    A copy of the module gets the method of its class back.
    """

    def __init__(self, module: nn.Module, optimizer: Any) -> None:
        self._module, self._optimizer = weakref.ref(module), weakref.ref(optimizer)
        self._old_train: Callable[..., Any] | None = module.__dict__.get("train")

    def __call__(self, mode: bool = True) -> nn.Module | None:
        module, optimizer = self._module(), self._optimizer()
        if module is not None:
            (self._old_train or partial(type(module).train, module))(mode)
            if optimizer is not None and any(one.training for one in optimizer._running_stats.modules):
                optimizer.train()
            elif optimizer is not None:
                optimizer.eval()
        return module

    def __reduce__(self) -> tuple[Any, ...]:
        module = self._module()
        return partial, (nn.Module.train if module is None else type(module).train, module)
