"""Training and evaluation: where the weights are between the steps of a variant of one pass, and of a base optimizer
with `train()` and `eval()` (schedule-free ones)."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn
from torch.optim import Optimizer

from fastsam.optim.buffers import Phase
from fastsam.optim.engine import Engine
from fastsam.optim.one_pass import OnePass
from fastsam.optim.statistics import Statistics


class Modes(Optimizer):
    """An optimizer whose weights between steps may differ from the weights to evaluate."""

    base_optimizer: Optimizer
    _engine: Engine
    _statistics: Statistics

    @property
    def training(self) -> bool:
        """False between `eval()` and `train()`, where no step is made: of a variant of one pass, and of a base
        optimizer that has `train_mode` in its parameter groups (schedule-free ones). Otherwise always True."""
        return self._engine.training and all(group.get("train_mode", True) for group in self.param_groups)

    def eval(self) -> None:
        """Give the model the weights to evaluate or save it with.

        With a variant of one pass (`MSAM`) the weights between steps are perturbed, and `eval()` restores the clean
        weights, bit for bit. If the base optimizer has an `eval()` (schedule-free optimizers), it is called, too. With
        any other optimizer this does nothing, and a second `eval()` does nothing.

        Raises RuntimeError inside a closure, and between `first_step()` and `second_step()` if the base optimizer has
        an `eval()`.
        """
        engine = self._engine
        if isinstance(engine, OnePass) and engine.training:
            if engine.in_closure:
                raise RuntimeError("eval() inside a closure of step(): leave it to before or after the step")
            engine.eval_()
        self._tell_base("eval")

    def train(self) -> None:
        """Go back to the weights of training, for the next forward pass; undoes `eval()`.

        With a variant of one pass the weights move to the perturbed point. They have the bits of before `eval()` if
        weights and rho were not written. After a state is loaded the weights may be clean or perturbed. Does nothing if
        the weights are there, and inside a closure.

        Raises RuntimeError between `first_step()` and `second_step()` if the base optimizer has a `train()`.
        """
        if self._engine.in_closure:
            return
        self._tell_base("train")
        if isinstance(self._engine, OnePass):
            self._engine.train_()

    def _tell_base(self, mode: str) -> None:
        """Call the base optimizer's `train()` or `eval()`, if it has one. They write the weights."""
        function = getattr(self.base_optimizer, mode, None)
        if function is None:
            return
        engine = self._engine
        if engine.in_closure or (engine.phase is not Phase.IDLE and not engine.one_pass):
            raise RuntimeError(
                f"{mode}() during a step: {type(self.base_optimizer).__name__} would change the perturbed weights. "
                f"Call it before or after the step"
            )
        function()
        engine._written()

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
