"""Attention masks of Hugging Face's models under `torch.vmap`.

Such a model leaves out a mask without padding. It reads `mask.all()` in Python, and no vmap can map what Python reads.
While torch compiles a model, the model does not read. The mask then stays, with the same values to rounding.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

_LIBRARY = "transformers."
_READS_VALUES = "data-dependent control flow"  # words of torch's error
_ADVICE = (
    f"{_READS_VALUES}: a Python condition reads the values of a tensor. If this is the attention mask of an encoder, "
    "pass it as numbers, which are not read and which eager attention and sdpa add to the scores: "
    "(1.0 - batch['attention_mask'][:, None, None, :]) * torch.finfo(torch.float32).min"
)


def is_hugging_face(module: nn.Module) -> bool:
    """Return True if a part of the model is a model of Hugging Face, or derived from one."""
    classes = {cls for part in module.modules() for cls in type(part).__mro__}
    return any(cls.__module__.startswith(_LIBRARY) for cls in classes)


@contextmanager
def kept_masks(is_kept: bool) -> Iterator[None]:
    """Let `torch.compiler.is_compiling()` return True inside if `is_kept` is True."""
    old = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = old or is_kept
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = old


def advice(error: Exception) -> str:
    """Return the cause of an error of torch.vmap and what to do about it, or "" for other errors."""
    return _ADVICE if _READS_VALUES in str(error) else ""
