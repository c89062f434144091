"""Emulation of torch's attention on CUDA, with its results and its refusals.

The kernels `efficient` and `cudnn` return the logsumexp only if an argument says so, and their backward passes need it.
torch sets the argument if the query, the key or the value says that it needs a gradient.
"""

import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.library import Library

aten = torch.ops.aten
KERNELS = ("efficient", "cudnn")
_LSE_BLOCK = 32  # the logsumexp of a head is padded to a multiple of it
_PADDING = 16  # torch pads the rows of a mask to a multiple of it, and the kernels demand a multiple of 4


class CudaAttention:
    """The emulated kernels.

    Attributes:
        calls: number of calls by (kernel, number of samples). Backward passes have the key ("backward", samples).
    """

    def __init__(self, kernel: str) -> None:
        self.kernel, self.calls = kernel, Counter[tuple[str, int]]()
        self.operation = getattr(aten, f"_scaled_dot_product_{kernel}_attention")

    def attention(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
        is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
    ) -> Tensor:  # fmt: skip
        """Do what `scaled_dot_product_attention` does before it calls a kernel of CUDA."""
        needs_logsumexp = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
        if attn_mask is not None:
            if attn_mask.dtype == torch.bool:
                attn_mask = torch.where(attn_mask, 0.0, -math.inf).to(query.dtype)
            length = attn_mask.shape[-1]
            attn_mask = F.pad(attn_mask, (0, -length % _PADDING))[..., :length].expand(*query.shape[:3], key.shape[2])
        output: Tensor = self.operation(
            query, key, value, attn_mask, needs_logsumexp, dropout_p, is_causal, scale=scale
        )[0]
        return output

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, needs_logsumexp: bool,
        dropout_p: float = 0.0, is_causal: bool = False, debug: bool = False, *, scale: float | None = None,
    ) -> tuple[Any, ...]:  # fmt: skip
        if mask is not None:
            assert mask.shape == (*query.shape[:3], key.shape[2])
            assert mask.stride(-1) == 1 and all(stride % 4 == 0 for stride in mask.stride()[:-1]), mask.stride()
        self.calls[self.kernel, len(query)] += 1
        scores = _scores(query, key, mask, scale)
        output = (scores.softmax(-1) @ value).transpose(1, 2).contiguous().transpose(1, 2)
        length = query.shape[2]
        logsumexp = query.new_full(
            (*query.shape[:2], -length % _LSE_BLOCK + length if needs_logsumexp else 0), math.inf
        )
        if needs_logsumexp:
            logsumexp[..., :length] = scores.logsumexp(-1)
        seeds = [torch.zeros((), dtype=torch.int64) for _ in range(2)]
        if self.kernel == "efficient":
            return output, logsumexp, *seeds
        return output, logsumexp, *[torch.empty(0)] * 2, query.shape[2], key.shape[2], *seeds, torch.empty(0)

    def backward_of_efficient(
        self, g: Tensor, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, output: Tensor,
        logsumexp: Tensor, *others: Any, scale: float | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
        return (*self._backward(g, query, key, value, mask, output, logsumexp, scale), None)

    def backward_of_cudnn(
        self, g: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, logsumexp: Tensor, seed: Tensor,
        offset: Tensor, mask: Tensor | None, *others: Any, scale: float | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        return self._backward(g, query, key, value, mask, output, logsumexp, scale)

    def _backward(
        self, g: Tensor, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, output: Tensor,
        logsumexp: Tensor, scale: float | None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        if query.shape[1] > 1 and logsumexp.stride(1) % 8:
            raise RuntimeError("LSE is not correctly aligned (strideH)")
        self.calls["backward", len(query)] += 1
        factor, length = scale or query.shape[-1] ** -0.5, query.shape[2]
        p = (_scores(query, key, mask, scale) - logsumexp[..., :length, None]).exp()
        ds = p * (g @ value.transpose(-1, -2) - (g * output).sum(-1, keepdim=True))
        return ds @ key * factor, ds.transpose(-1, -2) @ query * factor, p.transpose(-1, -2) @ g


def _scores(query: Tensor, key: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
    scores = query @ key.transpose(-1, -2) * (scale or query.shape[-1] ** -0.5)
    return scores if mask is None else scores + mask


@contextmanager
def cuda_attention(kernel: str) -> Iterator[CudaAttention]:
    """Let `scaled_dot_product_attention` call an emulated kernel inside."""
    emulation, library, name = CudaAttention(kernel), Library("aten", "IMPL"), f"_scaled_dot_product_{kernel}_attention"
    library.impl(name, emulation.forward, "CPU")
    library.impl(f"{name}_backward", getattr(emulation, f"backward_of_{kernel}"), "CPU")
    try:
        with mock.patch.object(F, "scaled_dot_product_attention", emulation.attention):
            yield emulation
    finally:
        library._destroy()
