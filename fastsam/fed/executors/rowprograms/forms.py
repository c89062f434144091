"""Operations of torch as several operations that have a form in a row program. A recording for a row program has these
in their place, and stops at operations that have no form."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import pi, prod, sqrt
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten
_INNER, _CUBE = sqrt(2 / pi), 0.044715  # constants of GELU's approximation by tanh


def gelu(x: Tensor, *, approximate: str = "none") -> Tensor:
    """Return `x/2 * (1 + erf(x/sqrt(2)))`, or its approximation by tanh."""
    half = x * 0.5
    return torch.addcmul(half, half, _squashed(x, approximate))


def gelu_backward(g: Tensor, x: Tensor, *, approximate: str = "none") -> Tensor:
    """Return the gradient of `gelu`."""
    squashed = _squashed(x, approximate)
    through_factor = torch.addcmul(g * 0.5, g, squashed, value=0.5)
    if approximate == "none":
        return torch.addcmul(through_factor, g * x, torch.exp(x * x * -0.5), value=1 / sqrt(2 * pi))
    inner = aten.tanh_backward(g * x, squashed)
    through_inner = torch.add(through_factor, inner, alpha=0.5 * _INNER)
    return torch.addcmul(through_inner, inner, x * x, value=1.5 * _INNER * _CUBE)


def _squashed(x: Tensor, approximate: str) -> Tensor:
    if approximate == "none":
        return torch.erf(x * sqrt(0.5))
    return torch.tanh(torch.add(x, x * x * x, alpha=_CUBE) * _INNER)


def silu(x: Tensor) -> Tensor:
    """Return `x * sigmoid(x)`."""
    return x * x.sigmoid()


def silu_backward(g: Tensor, x: Tensor) -> Tensor:
    """Return the gradient of `silu`."""
    s = x.sigmoid()
    return g * s + aten.sigmoid_backward(g * x, s)


def softmax(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    """Return the exponential of the log-softmax."""
    return aten._log_softmax(x, dim, half_to_float).exp()


def softmax_backward(g: Tensor, out: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    """Return the gradient of `softmax`."""
    return out * (g - (g * out).sum(dim, keepdim=True))


def mean(x: Tensor, dims: list[int] | None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
    """Return the sum over dimensions times the inverse of their size."""
    return x.sum(dims, keepdim, dtype=dtype) * (1.0 / prod(x.shape[d] for d in dims or range(x.dim())))


def layer_norm(
    x: Tensor, shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the normalised `x`, and the means and inverse deviations over its last dimensions."""
    dims = list(range(-len(shape), 0))
    mean = x.mean(dims, keepdim=True)
    centred = x - mean
    inverse = ((centred * centred).mean(dims, keepdim=True) + eps).rsqrt()
    out = centred * inverse
    out = out if weight is None else out * weight
    return out if bias is None else out + bias, mean, inverse


def layer_norm_backward(
    g: Tensor,
    x: Tensor,
    shape: Sequence[int],
    mean: Tensor,
    inverse: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mask: Sequence[bool],
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the gradients of `layer_norm`. A row program has only the gradient of `x`, because weights of
    rows are multiplied outside."""
    dims, leading = list(range(-len(shape), 0)), list(range(x.dim() - len(shape)))
    normal, inner = (x - mean) * inverse, g if weight is None else g * weight
    rest = inner - inner.mean(dims, keepdim=True) - normal * (inner * normal).mean(dims, keepdim=True)
    return rest * inverse, (g * normal).sum(leading) if mask[1] else None, g.sum(leading) if mask[2] else None


# An operation of forward passes without a form has None. A recording for a row program stops at it.
FORMS: Mapping[Any, Callable[..., Any] | None] = {
    aten.gelu.default: gelu,
    aten.gelu_backward.default: gelu_backward,
    aten.silu.default: silu,
    aten.silu_backward.default: silu_backward,
    aten._softmax.default: softmax,
    aten._softmax_backward_data.default: softmax_backward,
    aten.native_layer_norm.default: layer_norm,
    aten.native_layer_norm_backward.default: layer_norm_backward,
    aten.mean.dim: mean,
    aten.convolution.default: None,
    aten.native_group_norm.default: None,
    aten._scaled_dot_product_flash_attention_for_cpu.default: None,
    aten._scaled_dot_product_efficient_attention.default: None,
    aten._scaled_dot_product_flash_attention.default: None,
    aten._scaled_dot_product_cudnn_attention.default: None,
}
