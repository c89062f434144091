"""A warning about gradients that are clipped by hand, with a variant that combines both gradients of a step."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from fastsam.optim.sharded import is_sharded

MESSAGE = (
    "the second gradient was written between its backward pass and the update, as clip_grad_norm_ does. {} combines "
    "both gradients, and clipping one of them changes the combination. Pass max_grad_norm= to FusedSAM instead"
)


class ClipCheck:
    """Compares the version of one parameter's gradient at the end of its backward pass and at the update."""

    def __init__(self) -> None:
        self._parameter: weakref.ref[Tensor] | None = None
        self._noted: tuple[weakref.ref[Tensor], int] | None = None  # the gradient and its version
        self._is_done = False

    def watch(self, params: Sequence[Tensor]) -> None:
        """Note the gradient of one of these parameters in each of its backward passes from now on."""
        self._noted = None
        if self._is_done or torch.compiler.is_compiling():
            return
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            self._is_done = True  # gradients are reduced after they were accumulated
            return
        known = None if self._parameter is None else self._parameter()
        if known is not None and any(p is known for p in params):
            return
        for p in params:
            if p.requires_grad and not is_sharded(p):
                self._parameter = weakref.ref(p)
                p.register_post_accumulate_grad_hook(self._note)
                return

    def _note(self, parameter: Tensor) -> None:
        grad = parameter.grad
        if grad is not None and not self._is_done:
            self._noted = weakref.ref(grad), grad._version

    def warn(self, variant: str, stacklevel: int) -> None:
        """Warn once if the noted gradient was written since."""
        noted, self._noted = self._noted, None
        grad = None if noted is None else noted[0]()
        parameter = None if self._parameter is None else self._parameter()
        if noted is None or grad is None or parameter is None or parameter.grad is not grad:
            return
        if grad._version != noted[1]:
            self._is_done = True
            warnings.warn(MESSAGE.format(variant), UserWarning, stacklevel)
