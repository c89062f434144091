"""Phases of a step: properties for training loops, training and evaluation mode, and errors for calls out of order."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from numbers import Real
from types import FrameType
from typing import Any, Literal

from torch import Tensor, nn
from torch.autograd import profiler
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from fastsam.optim import amp
from fastsam.optim.backup import WeightState
from fastsam.optim.engine import Engine
from fastsam.optim.grad_checks import AccumulationCheck
from fastsam.optim.running_stats import RunningStatsFreezer
from fastsam.optim.variants.sam import SAM


class StepPhaseMixin:
    """Questions about the phase of a step, and `train()` and `eval()`, of an optimizer whose steps an engine makes."""

    base_optimizer: Optimizer
    param_groups: list[dict[str, Any]]
    _engine: Engine
    _accumulation_check: AccumulationCheck
    _running_stats: RunningStatsFreezer
    _optimizer_step_pre_hooks: dict[int, Any]
    _optimizer_step_post_hooks: dict[int, Any]

    @property
    def is_perturbed(self) -> bool:
        """True at a perturbed point: in every call of a closure but the first, and between `first_step()` and
        `second_step()`.

        A training loop should log and count only in the other pass. Always False with a variant of one pass; `training`
        tells where its weights are.
        """
        return self._engine.weight_state is not WeightState.ORIGINAL and not self._engine.one_pass

    @property
    def phase(self) -> Literal["first", "second"]:
        """The pass that a forward and backward pass belongs to now: "second" at the perturbed point, else "first"."""
        return "second" if self.is_perturbed else "first"

    @property
    def perturbs(self) -> bool:
        """True if the step that begins, or is under way, perturbs the weights and so takes two backward passes.

        False in a step in which the variant does not perturb (`start`, `interval`, `LookSAM`). Its first pass and
        `first_step()` may be left out. If they are made, the weights stay, and the step is the same with the second
        pass's gradients. Always False with a variant of one pass (`MSAM`), where `first_step()` is an error.
        """
        return self._engine.perturbs

    @property
    def variant(self) -> SAM:
        """The variant of SAM, with its options."""
        return self._engine.variant

    @property
    def combines_gradients(self) -> bool:
        """True if the variant's update combines both gradients, so that `max_grad_norm` has to clip them."""
        return self._engine.variant_step.reads_both

    @property
    def max_grad_norm(self) -> float | None:
        """Largest norm of the gradient that updates, or None; it can be changed between steps.

        A variant that combines both gradients clips the combination, with the same factor in each of its updates. A
        gradient whose norm is below the limit is used as it is.
        """
        return self._engine.max_grad_norm

    @max_grad_norm.setter
    def max_grad_norm(self, limit: float | None) -> None:
        if limit is not None and (isinstance(limit, bool) or not isinstance(limit, Real)):
            raise TypeError(f"max_grad_norm must be a number or None, got {limit!r}")
        if limit is not None and not limit > 0:
            raise ValueError(f"max_grad_norm must be above 0, got {limit!r}")
        try:
            self._engine.set_max_grad_norm(None if limit is None else float(limit))
        except OverflowError as error:
            raise ValueError("max_grad_norm must be a number that a float can hold, got a larger number") from error

    @property
    def grad_norm(self) -> Tensor | None:
        """Norm of the last first gradient (in adaptive groups of T * g), float64 on the device; None before the first
        step.

        With a variant of one pass, the norm of the vector along which it perturbed.
        """
        return None if self._engine.sumsq is None else self._engine.sumsq.sqrt()[0]

    # --- training and evaluation ---

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
        self._engine.eval()
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
        self._engine.train()

    def _tell_base(self, mode: str) -> None:
        """Call the `train()` or `eval()` of a base optimizer that has them. These methods write the weights."""
        function = getattr(self.base_optimizer, mode, None)
        if function is None:
            return
        engine = self._engine
        if engine.in_closure or (engine.weight_state is not WeightState.ORIGINAL and not engine.one_pass):
            raise RuntimeError(
                f"{mode}() during a step: {type(self.base_optimizer).__name__} would change the perturbed weights. "
                f"Call it before or after the step"
            )
        function()
        engine._invalidate_unsharded()

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Keep the weights inside as after `eval()`, and afterwards as they were before."""
        is_training = self.training
        self.eval()
        try:
            yield
        finally:
            if is_training:
                self.train()

    def _follow_modules(self) -> None:
        """Let `train()` and `eval()` of the modules of `model=` call the optimizer's methods, too."""
        if self._engine.one_pass:
            for module in self._running_stats.modules:
                object.__setattr__(module, "train", _Train(module, self))

    def _follow_mode(self) -> None:
        if any(module.training for module in self._running_stats.modules):
            self.train()
        else:
            self.eval()

    # --- the order of calls ---

    def _require_second(self, problem: str, remedy: str) -> None:
        """Raise RuntimeError if the step perturbs and its first half was not made."""
        if self._engine.weight_state is not WeightState.ORIGINAL or self._engine.perturbs:
            self._require(WeightState.PERTURBED, problem, remedy)

    def _require_halves(self, call: str) -> None:
        if self._engine.one_pass:
            raise RuntimeError(
                f"{call} with {type(self._engine.variant).__name__}, which takes one pass: its weights stay at the "
                "perturbed point. Call step() after one backward pass, or step(closure); eval() and train() move to "
                "the clean weights and back"
            )

    def _require(self, phase: WeightState, problem: str, remedy: str) -> None:
        if self._engine.weight_state is not phase:
            raise RuntimeError(f"{problem}; {remedy}{_trainer_hint()}")

    def _is_observed(self) -> bool:
        """Return True if a hook or a profiler looks at the step."""
        if _global_optimizer_pre_hooks or _global_optimizer_post_hooks or profiler._is_profiler_enabled:
            return True
        return bool(self._optimizer_step_pre_hooks or self._optimizer_step_post_hooks)

    def _finishes(self) -> bool:
        """Return True if `second_step` is running, so that the closure of `step` belongs to a trainer."""
        return self._engine.is_finishing and (
            self._engine.weight_state is not WeightState.ORIGINAL or not self._engine.perturbs
        )

    def _require_turn(self, closure: Callable[[], Any] | None) -> None:
        self._engine.require_ready()
        if self._engine.one_pass:
            if closure is None or self._finishes():
                self._accumulation_check.reset()
            else:
                amp.check_no_closure(self, one_pass=True)
        elif closure is None or self._finishes():
            self._require_second(
                "step() has nothing to do: no closure, and the weights are not perturbed",
                "call step(closure), or first_step() after the first and step() after the second backward pass",
            )
        else:
            problem = "step(closure) between first_step() and second_step()"
            self._require(WeightState.ORIGINAL, problem, "call second_step(), or restore() first")
            amp.check_no_closure(self)


def _trainer_hint() -> str:
    """Return the end of a message that names the trainer with two passes, if transformers' `Trainer` is a caller."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        kinds = [kind.__name__ for kind in type(frame.f_locals.get("self")).__mro__]
        if frame.f_globals.get("__name__") == "transformers.trainer" and "SAMTrainerMixin" not in kinds:
            return ". The Trainer of transformers makes one pass. Take fastsam.integrations.hf.SAMTrainer"
        frame = frame.f_back
    return ""


class _Train:
    """Replacement of `module.train`, which `module.eval()` calls too.

    A copy of the module gets the method of its class back.
    """

    def __init__(self, module: nn.Module, optimizer: StepPhaseMixin) -> None:
        self._module, self._optimizer = weakref.ref(module), weakref.ref(optimizer)
        self._old_train: Callable[..., Any] | None = module.__dict__.get("train")

    def __call__(self, mode: bool = True) -> nn.Module | None:
        module, optimizer = self._module(), self._optimizer()
        if module is not None:
            (self._old_train or partial(type(module).train, module))(mode)
            if optimizer is not None:
                optimizer._follow_mode()
        return module

    def __reduce__(self) -> tuple[Any, ...]:
        module = self._module()
        return partial, (nn.Module.train if module is None else type(module).train, module)
