"""Gradients that kernels cannot read directly: absent, in a different order of elements, or unusable."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def present(
    grads: Sequence[Tensor | None], like: Sequence[Tensor], numbers: Sequence[int]
) -> tuple[tuple[int, ...], list[Tensor]]:
    """Return the positions of the gradients that are not None, and these gradients.

    A gradient with another dtype or order of elements than its tensor in `like`, or of a subclass, is copied. Raises
    RuntimeError for a gradient that cannot be used. Messages count parameters by `numbers`.
    """
    slots = tuple(i for i, grad in enumerate(grads) if grad is not None)
    return slots, [_in_order(grads[i], like[i], numbers[i]) for i in slots]  # type: ignore[arg-type]


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
    # The memory of a subclass, or of a tensor with a pending sign, may not have its elements.
    bare = torch.compiler.is_compiling() or (type(grad) is Tensor and not grad.is_neg())
    if bare and grad.dtype == param.dtype and grad.stride() == param.stride():
        return grad
    empty = torch.empty_strided(param.shape, param.stride(), dtype=param.dtype, device=param.device)
    return empty.copy_(grad.detach())
