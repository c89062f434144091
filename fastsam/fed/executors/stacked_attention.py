"""Attention of stacked clients in one call: a rule under `torch.vmap` that folds the rows into the batch.

Attention has no weights, so a row of clients is no more than a longer batch. torch has no rule for its attention on the
CPU, and calls it once for each row.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._functorch.autograd_function import VmapInfo, custom_function_call_vmap_helper
from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter

_NAME, _KEY = "_scaled_dot_product_flash_attention_for_cpu", "FuncTorchBatched"
_attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default

Dims = tuple[int | None, ...]


@cache
def register() -> torch.library.Library | None:
    """Register the rule for all of this process, once. Return None if torch has a rule."""
    if torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{_NAME}", _KEY):
        return None
    library = torch.library.Library("aten", "IMPL")
    library.impl(_NAME, _stacked_attention, _KEY)
    return library


def _stacked_attention(
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
    interpreter: Any = retrieve_current_functorch_interpreter()
    return custom_function_call_vmap_helper(
        interpreter, _fold, _call, query, key, value, attn_mask, dropout_p, is_causal, scale
    )


def _call(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout_p: float, causal: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    return _attention(query, key, value, dropout_p, causal, attn_mask=mask, scale=scale)


def _fold(
    info: VmapInfo,
    in_dims: Dims,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *options: Any,
) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
    """Return the results for `[rows, batch, heads, length, width]`, and the dimensions of their rows."""
    n = info.batch_size
    query, key, value = (_rows(x, dim, n) for x, dim in zip((query, key, value), in_dims, strict=False))
    batch = query.shape[1]
    if mask is not None:
        mask = _mask_of_rows(mask, in_dims[3], n, batch)
    query, key, value = (x.flatten(0, 1) for x in (query, key, value))
    output, logsumexp = _call(query, key, value, mask, *options)
    return (output.unflatten(0, (n, batch)), logsumexp.unflatten(0, (n, batch))), (0, 0)


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
