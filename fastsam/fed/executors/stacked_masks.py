"""Attention masks of Hugging Face's models, which Python reads.

Such a model leaves out a mask without padding. It reads `mask.all()` in Python. No vmap can map what Python reads, no
capture can hold it, and on a GPU the host waits for it. While torch compiles a model, the model does not read. The mask
then stays, with the same values to rounding. So it stays under vmap, and in all passes on a GPU, because captured
passes must have the bits of the others.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

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


class KeptMasks:
    """A context, to be entered any number of times, in which `torch.compiler.is_compiling()` returns True."""

    def __enter__(self) -> None:
        self.old = torch.compiler._is_compiling_flag
        torch.compiler._is_compiling_flag = True

    def __exit__(self, *error: object) -> None:
        torch.compiler._is_compiling_flag = self.old


def kept_masks(module: nn.Module) -> AbstractContextManager[None]:
    """Return a context for passes of the model: `KeptMasks` for Hugging Face's, else a null context."""
    return KeptMasks() if is_hugging_face(module) else nullcontext()


def masks_of_passes(module: nn.Module, device: torch.device) -> AbstractContextManager[None]:
    """Return a context for passes of one client on a device. On a CPU a mask may be read."""
    return kept_masks(module) if device.type == "cuda" else nullcontext()


def advice(error: Exception) -> str:
    """Return the cause of an error of torch.vmap and what to do about it, or "" for other errors."""
    return _ADVICE if _READS_VALUES in str(error) else ""
