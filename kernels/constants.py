"""Shared dtypes, constants and checks of all implementations and their callers. The device scalars are in `hparams`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)  # dtypes of weights and gradients
HIGH_BITS, LOW_BITS = 28, 52  # bits of the two limbs of a fixed-point number below its binary point
LIMIT = 2.0**34  # largest absolute value of a term of such a number; its high limb then has 62 bits
CLIP_EPS = 1e-6  # torch.nn.utils.clip_grad_norm_ adds it to the norm


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the arithmetic and of the state for weights of `dtype`: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class FreedError(RuntimeError):
    """An error for a tensor with elements but without memory. It is raised before anything is written."""


def check_not_freed(tensors: Sequence[Tensor]) -> None:
    """Raise FreedError if a tensor with elements has no memory, which no kernel may read."""
    for i, tensor in enumerate(tensors):
        if tensor.data_ptr() == 0 and tensor.numel():
            raise FreedError(
                f"tensor {i} of {len(tensors)} has no memory: its storage was freed. Run the backward pass again "
                f"before the step, and free gradients only after it"
            )
