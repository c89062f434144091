"""Kernels by backend, device and dtype: the functions of `fastsam_kernels.reference`, implemented by one backend.

The optimizer and the executors call `bind` once and use its kernels in every step. The compiled ops are also available
as `torch.ops.fastsam.*`, with their own checks (docs/api.md)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fastsam import backends
from fastsam.backends import Kernels
from fastsam_kernels import small_bmm
from fastsam_kernels.orders import native_orders as native_orders
from fastsam_kernels.rowprograms import program
from fastsam_kernels.rowprograms.instructions import Input, Instruction
from fastsam_kernels.rowprograms.program import RowProgram
from fastsam_kernels.small_bmm import Product

row_steps_, FAILURES = program.steps_, program.FAILURES  # local steps by row programs, and why a row has failed


def bind(backend: str, device: torch.device, dtype: torch.dtype) -> Kernels:
    """Return the kernels that serve `dtype` on `device`.

    Raises ValueError and RuntimeError as `fastsam.backends.select` does.
    """
    return backends.select(backend, device, dtype).load()


def product_of(a: Tensor, b: Tensor, *, backend: str = "auto") -> Product | None:
    """Return an object that multiplies stacked matrices like these faster than torch does, or None.

    Only the compiled backend has such objects, see `fastsam_kernels.small_bmm.product_of`.
    """
    return small_bmm.product_of(a, b) if backends.select(backend, a.device, a.dtype).name == "native" else None


def has_row_programs(device: torch.device, dtype: torch.dtype, *, backend: str = "auto") -> bool:
    """Return True if there are row programs for such tensors: float32, on the CPU or CUDA, compiled backend."""
    return program.why_not(dtype, device) is None and backends.select(backend, device, dtype).name == "native"


def row_program(
    instructions: Sequence[Instruction],
    inputs: Sequence[Input],
    scratch: int,
    width: int,
    device: torch.device = program.CPU,
) -> RowProgram:
    """Return a `fastsam_kernels.rowprograms.program.RowProgram`. Call it only if `has_row_programs`."""
    return RowProgram(instructions, inputs, scratch, width, device)
