"""Warnings about the gradients of a step.

`AccumulationCheck` finds gradients that `step(closure)` would clear. `PassCheck` finds a backward pass that is missing,
and weights that are written between the halves of a step. `ClipCheck` finds gradients that are clipped by hand, with a
variant that combines both gradients.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from fastsam.optim.parameters import parameters_of
from fastsam.optim.sharded import is_dtensor, to_local
from fastsam.optim.tensor_table import Groups, any_gradient

FIRST = 4  # number of steps that are checked, because a loop accumulates in all steps or in none

ACCUMULATED = (
    "there were gradients when step(closure) began that no step has used. They are not part of this one: the closure "
    "is called twice, each time with gradients cleared, and makes its whole gradient. To accumulate over "
    "micro-batches, run all of them inside the closure, or call first_step(zero_grad=True) after the backward passes "
    "of all and second_step(zero_grad=True) after theirs once more. Without accumulation, leave out the backward pass "
    "before step(closure)"
)
EMPTY_CLOSURE = (
    "the closure made no gradient, so this step trains nothing. The closure must compute the loss, call "
    "loss.backward() and return the loss"
)
EMPTY_FIRST_STEP = (
    "first_step() found no gradient, so it perturbs nothing. Call loss.backward() before first_step(), and zero_grad() "
    "before loss.backward()"
)
WRITTEN = (
    "parameters {} were written between first_step() and second_step(), for example by the step() of another "
    "optimizer. second_step() restores the weights from before first_step(), so what was written is lost. Make other "
    "steps before first_step() or after second_step()"
)
NO_SECOND_PASS = (
    "the gradients have not changed since first_step(). The second backward pass is missing: call loss.backward() at "
    "the perturbed weights, between first_step() and second_step(). Without it, this step is {}"
)
CLIPPED = (
    "the second gradient was written between its backward pass and the update, as clip_grad_norm_ does. {} combines "
    "both gradients, and clipping one of them changes the combination. Pass max_grad_norm= to FusedSAM instead"
)


class GradRecord:
    """Identities and versions of gradients. It keeps none of them alive."""

    def __init__(self, grads: Sequence[Tensor]) -> None:
        self._first = weakref.ref(grads[0]) if grads else None  # new tensors may have the ids of deleted ones
        self._marks = _marks(grads)

    def equals(self, grads: Sequence[Tensor]) -> bool:
        """Return True if these are the recorded gradients, and none was written since."""
        return (self._first is None or self._first() is not None) and _marks(grads) == self._marks


class AccumulationCheck:
    """Check of the gradients from the end of one closure's step to the beginning of the next."""

    def __init__(self) -> None:
        self._steps_left = FIRST
        self._used_grads: GradRecord | None = GradRecord([])  # None: not noted

    def reset(self) -> None:
        """Forget the known gradients, because a step failed or was made in two halves."""
        self._used_grads = None

    def record(self, groups: Groups) -> None:
        """Record the present gradients, which were all used."""
        if not self._steps_left:
            return
        self._steps_left -= 1
        self._used_grads = GradRecord(_grads(groups))

    def check(self, groups: Groups) -> None:
        """Warn once if there are other gradients now, which the step that begins would clear."""
        used_grads, self._used_grads = self._used_grads, None  # None until this step is made
        if used_grads is None or not (grads := _grads(groups)) or used_grads.equals(grads):
            return
        if any(g.layout != torch.strided or bool(to_local(g).any()) for g in grads):
            self._steps_left = 0
            warnings.warn(ACCUMULATED, UserWarning, stacklevel=5)


class PassCheck:
    """Check that the passes of a step make gradients, and that only they come between its halves, in the first
    steps."""

    def __init__(self) -> None:
        self.steps_left = FIRST  # number of steps that are still checked
        self._old_grads: GradRecord | None = None  # None: there is nothing to compare with
        self._weight_marks: list[tuple[int, int]] = []  # marks of parameters that the second half restores

    def reset(self) -> None:
        """Forget the recorded gradients and weights, because the step was given up."""
        self._old_grads, self._weight_marks = None, []

    def warn_without_gradient(self, groups: Groups, message: str, stacklevel: int) -> None:
        """Warn once if the first pass of a step left no gradient."""
        if self.steps_left and not torch.compiler.is_compiling() and not any_gradient(parameters_of(groups)):
            self.steps_left = 0
            warnings.warn(message, UserWarning, stacklevel)

    def record(self, groups: Groups, is_cleared: bool, is_perturbed: bool) -> None:
        """Record gradients and weights at the end of a first half.

        Args:
            is_cleared: the gradients are cleared next.
            is_perturbed: the weights were saved, and are restored in the second half.
        """
        self.reset()
        if not self.steps_left or torch.compiler.is_compiling():
            return
        params = parameters_of(groups)
        if grads := _grads(groups):
            self._old_grads = GradRecord([] if is_cleared else grads)
        if is_perturbed and not any(map(is_dtensor, params)):
            self._weight_marks = _marks(params)

    def warn(self, groups: Groups, stacklevel: int) -> None:
        """Warn once if the gradients are still the recorded ones, or if weights were written, as the step ends."""
        if not self.steps_left or torch.compiler.is_compiling():
            return
        self.steps_left -= 1
        old_grads, weight_marks = self._old_grads, self._weight_marks
        self.reset()
        versions = dict(_marks(parameters_of(groups))) if weight_marks else {}
        written = [i for i, (p, version) in enumerate(weight_marks) if versions.get(p, version) != version]
        if written:
            self.steps_left = 0
            warnings.warn(WRITTEN.format(written), UserWarning, stacklevel)
        if old_grads is not None and old_grads.equals(grads := _grads(groups)):
            self.steps_left = 0
            meaning = "one of the base optimizer, without SAM" if grads else "made without gradients"
            warnings.warn(NO_SECOND_PASS.format(meaning), UserWarning, stacklevel)


def _grads(groups: Groups) -> list[Tensor]:
    return [g for p in parameters_of(groups) if (g := p.grad) is not None]


def _marks(tensors: Sequence[Tensor]) -> list[tuple[int, int]]:
    """Return identities and versions, where a write into the local part of a sharded tensor counts too."""
    return [(id(t), t._version + (to_local(t)._version if is_dtensor(t) else 0)) for t in tensors]


class ClipCheck:
    """Compares the version of one parameter's gradient at the end of its backward pass and at the update.

    It keeps no reference to the parameter or its gradient, and no weak one, with which `torch.utils.swap_tensors` would
    refuse to swap them.
    """

    def __init__(self) -> None:
        self._handle: RemovableHandle | None = None  # handle of the hook on the parameter
        self._grad_mark: tuple[int, int] | None = None  # id and version of the gradient
        self._is_done = False

    def watch(self, params: Sequence[Tensor]) -> None:
        """Note the gradient of the first of these parameters that needs one, in each of its backward passes."""
        self._grad_mark = None
        if self._is_done or torch.compiler.is_compiling():
            return
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            self._is_done = True  # gradients are reduced after they were accumulated
            return
        parameter = _first(params)
        if parameter is not None and not self._is_hooked(parameter):
            self._handle = parameter.register_post_accumulate_grad_hook(self._note)

    def _is_hooked(self, parameter: Tensor) -> bool:
        hooks = parameter._post_accumulate_grad_hooks
        return self._handle is not None and hooks is not None and self._handle.id in hooks

    def _note(self, parameter: Tensor) -> None:
        grad = parameter.grad
        if grad is not None and not self._is_done:
            self._grad_mark = id(grad), grad._version

    def warn(self, params: Sequence[Tensor], variant: str, stacklevel: int) -> None:
        """Warn once if the noted gradient was written since. A compiled step, which cannot read hooks, never warns."""
        if torch.compiler.is_compiling():
            return
        mark, self._grad_mark = self._grad_mark, None
        if mark is None or (parameter := _first(params)) is None or not self._is_hooked(parameter):
            return
        grad = parameter.grad
        if grad is not None and id(grad) == mark[0] and grad._version > mark[1]:
            self._is_done = True
            warnings.warn(CLIPPED.format(variant), UserWarning, stacklevel)


def _first(params: Sequence[Tensor]) -> Tensor | None:
    return next((p for p in params if p.requires_grad and not is_dtensor(p)), None)
