"""What has to be set before the first test module is imported."""

from __future__ import annotations

import os

import torch

# Triton decides at its import whether kernels are compiled for a GPU or interpreted on the CPU.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
