"""Training and evaluation: where the weights are between the steps of a variant of one pass."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn
from torch.optim import Optimizer

from fastsam.optim.engine import Engine
from fastsam.optim.one_pass import OnePass
from fastsam.optim.statistics import Statistics


class Modes(Optimizer):
    """An optimizer whose weights may rest at a perturbed point between steps."""

    _engine: Engine
    _statistics: Statistics

    @property
    def training(self) -> bool:
        """False between `eval()` and `train()` of a variant of one pass, which makes no step then; with every other
        variant always True."""
        return self._engine.training

    def eval(self) -> None:
        """The clean weights, bit for bit, to evaluate or save the model with. Between the steps of a variant of one
        pass (`MSAM`) they are the perturbed ones; with every other variant this does nothing, as does a second
        `eval()`. Raises RuntimeError inside a closure.
        """
        engine = self._engine
        if isinstance(engine, OnePass) and engine.training:
            if engine.in_closure:
                raise RuntimeError("eval() inside a closure of step(): leave it to before or after the step")
            engine.eval_()

    def train(self) -> None:
        """Back to the perturbed point, for the next forward pass; to the same bits, if nobody wrote the weights or rho.
        Does nothing where the weights are there, and with variants that take two passes. After loading a state it takes
        the weights there, whichever the model's were.
        """
        if isinstance(self._engine, OnePass) and not self._engine.in_closure:
            self._engine.train_()

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Inside, the weights are as after `eval()`; afterwards as they were before."""
        trained = self.training
        self.eval()
        try:
            yield
        finally:
            if trained:
                self.train()

    def _follow_modules(self) -> None:
        """From now on `train()` and `eval()` of the modules of `model=` are this optimizer's too."""
        if isinstance(self._engine, OnePass):
            for module in self._statistics.modules:
                object.__setattr__(module, "train", _Train(module, self))

    def _follow_mode(self) -> None:
        if any(module.training for module in self._statistics.modules):
            self.train()
        else:
            self.eval()


class _Train:
    """Stands for `module.train`, which `module.eval()` calls too. A copy of the module gets the method of its class
    back."""

    def __init__(self, module: nn.Module, optimizer: Modes) -> None:
        self._module, self._optimizer = weakref.ref(module), weakref.ref(optimizer)
        self._before: Callable[..., Any] | None = module.__dict__.get("train")

    def __call__(self, mode: bool = True) -> nn.Module | None:
        module, optimizer = self._module(), self._optimizer()
        if module is not None:
            (self._before or partial(type(module).train, module))(mode)
            if optimizer is not None:
                optimizer._follow_mode()
        return module

    def __reduce__(self) -> tuple[Any, ...]:
        module = self._module()
        return partial, (nn.Module.train if module is None else type(module).train, module)
