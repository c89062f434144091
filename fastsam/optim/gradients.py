"""Gradients that kernels cannot read directly: absent, in a different order of elements, or unusable."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def present(
    grads: Sequence[Tensor | None], like: Sequence[Tensor], numbers: Sequence[int]
) -> tuple[tuple[int, ...], list[Tensor]]:
    """Return the positions of the gradients that are not None, and these gradients.

    Each gradient is dense, in the order of elements of its tensor in `like`.

    Args:
        grads: gradients, or None.
        like: one tensor per gradient.
        numbers: numbers of the parameters, for messages.

    Raises RuntimeError for a gradient that cannot be used.
    """
    slots, usable = [], []
    for i, (grad, param) in enumerate(zip(grads, like, strict=True)):
        if grad is not None:
            slots.append(i)
            usable.append(_in_order(grad.detach(), param, numbers[i]))
    return tuple(slots), usable


def _in_order(grad: Tensor, param: Tensor, number: int) -> Tensor:
    if grad.layout != torch.strided:
        raise RuntimeError(
            f"the gradient of parameter {number} is sparse ({grad.layout}); FusedSAM needs dense gradients: for an "
            "embedding use sparse=False, or give its parameters a separate optimizer"
        )
    if grad.is_complex():
        raise RuntimeError(
            f"the gradient of parameter {number} is complex ({grad.dtype}); FusedSAM needs real gradients"
        )
    if grad.shape != param.shape or grad.device != param.device:
        raise RuntimeError(
            f"the gradient of parameter {number} is {tuple(grad.shape)} on {grad.device}, the parameter "
            f"{tuple(param.shape)} on {param.device}: "
            "it belongs to the parameter before a change; zero the gradients and run the backward pass again"
        )
    bare = torch.compiler.is_compiling() or (type(grad) is Tensor and not grad.is_neg())
    if bare and grad.dtype == param.dtype and grad.stride() == param.stride():
        return grad
    return torch.empty_strided(param.shape, param.stride(), dtype=param.dtype, device=param.device).copy_(grad)
