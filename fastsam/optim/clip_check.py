"""A warning about gradients that are clipped by hand, with a variant that combines both gradients of a step."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from fastsam.optim.sharded import is_dtensor

MESSAGE = (
    "the second gradient was written between its backward pass and the update, as clip_grad_norm_ does. {} combines "
    "both gradients, and clipping one of them changes the combination. Pass max_grad_norm= to FusedSAM instead"
)


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
            warnings.warn(MESSAGE.format(variant), UserWarning, stacklevel)


def _first(params: Sequence[Tensor]) -> Tensor | None:
    return next((p for p in params if p.requires_grad and not is_dtensor(p)), None)
