"""Attention of stacked clients in one call: rules under `torch.vmap` that fold the rows into the batch.

Attention has no weights, so a row of clients is no more than a longer batch. torch has no rule for its attention on the
CPU, and calls it once for each row. torch's rules for CUDA lose the backward pass: a mapped tensor says that it needs
no gradient, so torch leaves out the logsumexp, which the backward pass reads ("LSE is not correctly aligned"). The
flash attention of CUDA always returns it, and keeps torch's rule.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._functorch.autograd_function import VmapInfo, custom_function_call_vmap_helper
from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter

_KEY = "FuncTorchBatched"
_ON_CPU = "_scaled_dot_product_flash_attention_for_cpu"
_ON_CUDA = ("_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention")
MAX_BATCH = 65_535  # samples of a call on CUDA, a dimension of the grid of its blocks
_ALIGNED = 16  # elements: rows of a mask begin at multiples of it

Attention = Callable[..., Any]  # function of query, key, value and mask, and of options; a tuple of results
Dims = tuple[int | None, ...]


@cache
def register() -> torch.library.Library:
    """Register the rules for all of this process, once. They replace torch's rules for CUDA."""
    library = torch.library.Library("aten", "IMPL")
    if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{_ON_CPU}", _KEY):
        library.impl(_ON_CPU, _rule_on_cpu, _KEY)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that a rule is replaced
        for name in _ON_CUDA:
            library.impl(name, partial(_rule_on_cuda, getattr(torch.ops.aten, name).default), _KEY)
    return library


def _rule_on_cpu(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> Any:
    """Return output and logsumexp of the attention of tensors that are mapped by the innermost vmap."""
    return _map(_attention_on_cpu, query, key, value, attn_mask, dropout_p, is_causal, scale)


def _attention_on_cpu(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout_p: float, causal: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    attention = getattr(torch.ops.aten, _ON_CPU).default
    return attention(query, key, value, dropout_p, causal, attn_mask=mask, scale=scale)


def _rule_on_cuda(
    attention: Attention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    needs_logsumexp: bool,
    dropout_p: float = 0.0,
    *options: Any,
    **keywords: Any,
) -> Any:
    """Return the results of `attention` for tensors that are mapped by the innermost vmap."""
    call = partial(_attention_on_cuda, partial(attention, **keywords))
    return _map(call, query, key, value, mask, dropout_p, needs_logsumexp, *options)


def _attention_on_cuda(
    attention: Attention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout_p: float,
    needs_logsumexp: bool,
    *options: Any,
) -> tuple[Any, ...]:
    """Return the results for `[batch, heads, length, width]`, by several calls if the batch is too long for one."""
    if mask is not None:
        mask = _aligned(mask).expand(len(query), *mask.shape[1:])
    # These tensors are below the mapping, where it is known if they need gradients.
    tensors = (query, key, value, mask)
    needs_logsumexp |= torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    calls = [
        attention(*(t if t is None else t[i : i + MAX_BATCH] for t in tensors), needs_logsumexp, dropout_p, *options)
        for i in range(0, len(query), MAX_BATCH)
    ]
    if len(calls) == 1:
        return calls[0]
    return (*(torch.cat([results[i] for results in calls]) for i in range(2)), *calls[0][2:])


def _aligned(mask: Tensor) -> Tensor:
    """Return a mask each of whose rows begins at a multiple of `_ALIGNED`, as the kernels demand."""
    if mask.stride(-1) == 1 and all(stride % _ALIGNED == 0 for stride in mask.stride()[:-1]):
        return mask
    length = mask.shape[-1]
    return F.pad(mask, (0, -length % _ALIGNED))[..., :length]


def _map(
    attention: Attention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout_p: float,
    *options: Any,
) -> Any:
    """Return the results of `attention` for tensors that are mapped by the innermost vmap. Raises RuntimeError if rows
    would draw other numbers than `randomness` says."""
    interpreter: Any = retrieve_current_functorch_interpreter()
    if dropout_p and interpreter.randomness() != "different":
        raise RuntimeError(
            "vmap: attention with dropout draws different random numbers for each row. Call vmap with "
            f"randomness='different' (got {interpreter.randomness()!r}), or set dropout_p=0"
        )
    fold = partial(_fold, attention)
    return custom_function_call_vmap_helper(interpreter, fold, attention, query, key, value, mask, dropout_p, *options)


def _fold(
    attention: Attention,
    info: VmapInfo,
    in_dims: Dims,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *options: Any,
) -> tuple[tuple[Any, ...], tuple[int | None, ...]]:
    """Return the results for `[rows, batch, heads, length, width]`, and the dimensions of their rows. Only the output
    and the logsumexp have rows."""
    n = info.batch_size
    query, key, value = (_rows(x, dim, n) for x, dim in zip((query, key, value), in_dims, strict=False))
    batch = query.shape[1]
    if mask is not None:
        mask = _mask_of_rows(mask, in_dims[3], n, batch)
    query, key, value = (x.flatten(0, 1) for x in (query, key, value))
    output, logsumexp, *others = attention(query, key, value, mask, *options)
    results = (output.unflatten(0, (n, batch)), logsumexp.unflatten(0, (n, batch)), *others)
    return results, (0, 0, *[None] * len(others))


def _rows(x: Tensor, dim: int | None, n: int) -> Tensor:
    """Return x with its rows first. An x without rows is repeated."""
    return x.expand(n, *x.shape) if dim is None else x.movedim(dim, 0)


def _mask_of_rows(mask: Tensor, dim: int | None, n: int, batch: int) -> Tensor:
    """Return a mask for `[rows*batch, heads, length, length]`, or the mask itself if it serves every row and sample."""
    if dim is None and (mask.dim() < 4 or mask.shape[0] == 1):
        return mask
    rows = _rows(mask, dim, n)
    rows = rows.reshape(n, *[1] * (5 - rows.dim()), *rows.shape[1:])  # [rows, batch or 1, heads or 1, length, length]
    return rows.expand(n, batch, *rows.shape[2:]).flatten(0, 1)
