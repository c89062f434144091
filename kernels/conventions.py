"""What all implementations and their callers agree on besides the device scalars (`columns`): dtypes and constants."""

from __future__ import annotations

import torch

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)  # of weights and gradients
HIGH_BITS, LOW_BITS = 28, 52  # of the two limbs of a fixed-point number, below the point and below each other
LIMIT = 2.0**34  # of what is added to such a number: its high limb has 62 bits then
CLIP_EPS = 1e-6  # torch.nn.utils.clip_grad_norm_ adds it to the norm


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the arithmetic and of the state for weights of `dtype`: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32
