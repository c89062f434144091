"""The op surface: every argument is checked once here, a backend is chosen, and it is called.

The functions have the names, arguments and meaning of `fastsam_kernels.reference`, plus `backend=`. Callers that
checked their buffers when they made them (the optimizer, the executors) call `bind(...)` once and skip the checks in
every step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from fastsam import backends
from fastsam.arguments import Call, tensors_checked
from fastsam.backends import Kernels
from fastsam_kernels import product
from fastsam_kernels.conventions import compute_dtype
from fastsam_kernels.product import Product
from fastsam_kernels.rowprograms import program
from fastsam_kernels.rowprograms.instructions import Input, Instruction
from fastsam_kernels.rowprograms.program import RowProgram


def bind(backend: str, device: torch.device, dtype: torch.dtype) -> Kernels:
    """The kernels that serve `dtype` on `device`, without the checks of this module.

    Raises ValueError and RuntimeError as `fastsam.backends.select` does.
    """
    return backends.select(backend, device, dtype).load()


def product_of(a: Tensor, b: Tensor, *, backend: str = "auto") -> Product | None:
    """What multiplies stacked matrices like these faster than torch does, see `fastsam_kernels.product.product_of`;
    None with another backend than the compiled one.
    """
    return product.product_of(a, b) if backends.select(backend, a.device, a.dtype).name == "native" else None


def has_row_programs(device: torch.device, dtype: torch.dtype, *, backend: str = "auto") -> bool:
    """Whether there are row programs for such tensors: with the compiled backend, on the CPU or CUDA, in float32."""
    return program.why_not(dtype, device) is None and backends.select(backend, device, dtype).name == "native"


def row_program(
    instructions: Sequence[Instruction],
    inputs: Sequence[Input],
    scratch: int,
    width: int,
    device: torch.device = program.CPU,
) -> RowProgram:
    """See `fastsam_kernels.rowprograms.program.RowProgram`. To be made only where `has_row_programs`."""
    return RowProgram(instructions, inputs, scratch, width, device)


@tensors_checked
def norm_(
    sumsq: Tensor,
    grads: Sequence[Tensor],
    weights: Sequence[Tensor],
    table: Tensor,
    hyper: Tensor,
    accumulate: bool = False,
    *,
    backend: str = "auto",
) -> None:
    """`sumsq[r] (+)= ||T*g||^2`, see `fastsam_kernels.reference.norm_`. Raises ValueError on arguments that do not fit
    together.

    On the CPU, `weights` are asked for when a group is adaptive; on a GPU looking would wait for the device.
    """
    call = Call("norm_", table, hyper, sumsq.device)
    call.vector("sumsq", sumsq)
    dtype = call.operand("grads", grads)
    if weights or call.adaptive():
        call.operand("weights", weights, dtype)
        call.same_order("weights", weights, "grads", grads)
    bind(backend, sumsq.device, dtype).norm_(sumsq, grads, weights, table, hyper, accumulate)


@tensors_checked
def perturb_(
    z: Sequence[Tensor],
    origin: Tensor,
    grads: Sequence[Tensor],
    table: Tensor,
    hyper: Tensor,
    sumsq: Tensor,
    save: bool,
    seed: Tensor | None = None,
    *,
    backend: str = "auto",
) -> None:
    """Moves `z` to the perturbed point, see `fastsam_kernels.reference.perturb_`.

    Raises ValueError on arguments that do not fit together.
    """
    call = Call("perturb_", table, hyper, origin.device)
    dtype = call.operand("z", z, written=True)
    call.operand("grads", grads, dtype)
    call.same_order("z", z, "grads", grads)
    call.field("origin", origin, dtype, master=True, written=True)
    call.vector("sumsq", sumsq)
    if seed is not None:
        call.vector("seed", seed, torch.int64)
    bind(backend, origin.device, dtype).perturb_(z, origin, grads, table, hyper, sumsq, save, seed)


@tensors_checked
def restore_(z: Sequence[Tensor], origin: Tensor, table: Tensor, *, backend: str = "auto") -> None:
    """`z = origin`, bit for bit, see `fastsam_kernels.reference.restore_`.

    Raises ValueError on arguments that do not fit together.
    """
    call = Call("restore_", table, None, origin.device, rows=origin.shape[0] if origin.dim() == 2 else 1)
    dtype = call.operand("z", z, written=True)
    call.field("origin", origin, dtype, master=True)
    bind(backend, origin.device, dtype).restore_(z, origin, table)


@tensors_checked
def dual_norm_(
    sumsq: Tensor,
    grads: Sequence[Tensor],
    mu: Tensor,
    s: Tensor,
    table: Tensor,
    hyper: Tensor,
    accumulate: bool = False,
    *,
    backend: str = "auto",
) -> None:
    """`sumsq[r] (+)= ||alpha*(g - mu) - s||^2`, see `fastsam_kernels.reference.dual_norm_`. `mu` and `s` may have the
    row stride 0.

    Raises ValueError on arguments that do not fit together.
    """
    call = Call("dual_norm_", table, hyper, sumsq.device)
    call.vector("sumsq", sumsq)
    dtype = call.operand("grads", grads)
    call.field("mu", mu, compute_dtype(dtype))
    call.field("s", s, compute_dtype(dtype))
    bind(backend, sumsq.device, dtype).dual_norm_(sumsq, grads, mu, s, table, hyper, accumulate)


@tensors_checked
def dual_perturb_(
    z: Sequence[Tensor],
    origin: Tensor,
    mu: Tensor,
    grads: Sequence[Tensor],
    s: Tensor,
    table: Tensor,
    hyper: Tensor,
    sumsq: Tensor,
    eps: Tensor | None = None,
    *,
    backend: str = "auto",
) -> None:
    """Moves `z` along the dual's direction and `mu` by a step, see `fastsam_kernels.reference.dual_perturb_`.

    `origin` and `s` may have the row stride 0. Raises ValueError on arguments that do not fit together.
    """
    call = Call("dual_perturb_", table, hyper, origin.device)
    dtype = call.operand("z", z, written=True)
    call.operand("grads", grads, dtype)
    call.same_order("z", z, "grads", grads)
    call.field("origin", origin, dtype, master=True)
    call.field("mu", mu, compute_dtype(dtype), written=True)
    call.field("s", s, compute_dtype(dtype))
    if eps is not None:
        call.field("eps", eps, compute_dtype(dtype), written=True)
    call.vector("sumsq", sumsq)
    bind(backend, origin.device, dtype).dual_perturb_(z, origin, mu, grads, s, table, hyper, sumsq, eps)


@tensors_checked
def inner_(
    out: Tensor,
    x: Sequence[Tensor],
    y: Sequence[Tensor],
    table: Tensor,
    accumulate: bool = False,
    *,
    backend: str = "auto",
) -> None:
    """`out[r] (+)= (<x, y>, <y, y>)`, see `fastsam_kernels.reference.inner_`. `x` and `y` may have the row stride 0.

    Raises ValueError on arguments that do not fit together.
    """
    call = Call("inner_", table, None, out.device, rows=out.shape[0] if out.dim() == 2 else 1)
    call.pairs("out", out)
    dtype = call.operand("x", x)
    call.operand("y", y, dtype)
    call.same_order("x", x, "y", y)
    bind(backend, out.device, dtype).inner_(out, x, y, table, accumulate)


@tensors_checked
def accumulate_(
    high_: Tensor,
    low_: Tensor,
    x: Tensor,
    factor: float,
    *,
    base: Tensor | None = None,
    largest_: Tensor | None = None,
    backend: str = "auto",
) -> None:
    """Adds `factor * (x - base)` to fixed-point numbers, row by row, see `fastsam_kernels.reference.accumulate_`.

    Raises ValueError on arguments that do not fit together.
    """
    shape = list(high_.shape)
    several = x.dim() > high_.dim()
    dense = x.numel() == 0 or (x[0] if several else x).is_contiguous()
    fits = list(x.shape[several:]) == shape and x.device == high_.device
    if x.dtype not in (torch.float32, torch.float64) or not fits or not dense:
        _misfit("x", f"float32 or float64 {shape} or rows of it, dense, on {high_.device}", x)
    for name, limb in (("high_", high_), ("low_", low_)):
        _contiguous(name, limb, torch.int64, shape, x.device)
    if base is not None:
        _contiguous("base", base, x.dtype, shape, x.device)
    if largest_ is not None:
        _contiguous("largest_", largest_, torch.float64, [x.shape[0] if several else 1], x.device)
    bind(backend, x.device, x.dtype).accumulate_(high_, low_, x, factor, base=base, largest_=largest_)


def _contiguous(name: str, tensor: Tensor, dtype: torch.dtype, shape: list[int], device: torch.device) -> None:
    fits = tensor.dtype == dtype and list(tensor.shape) == shape and tensor.device == device
    if not fits or not tensor.is_contiguous():
        _misfit(name, f"contiguous {dtype} {shape} on {device}", tensor)


def _misfit(name: str, expected: str, got: Tensor) -> NoReturn:
    found = f"{got.dtype} {list(got.shape)} with strides {got.stride()} on {got.device}"
    raise ValueError(f"accumulate_: {name} must be {expected}, got {found}")


@tensors_checked
def update_norm_(
    sumsq: Tensor,
    z: Sequence[Tensor],
    origin: Tensor | None,
    grads: Sequence[Tensor],
    table: Tensor,
    hyper: Tensor,
    *,
    backend: str = "auto",
    **options: Any,
) -> None:
    """The squared norm that clipping looks at, see `fastsam_kernels.reference.update_norm_` (and for `options`).

    Raises ValueError on arguments that do not fit together.
    """
    call = Call("update_norm_", table, hyper, sumsq.device)
    call.vector("sumsq", sumsq)
    dtype = call.update(z, origin, grads, options)
    bind(backend, sumsq.device, dtype).update_norm_(sumsq, z, origin, grads, table, hyper, **options)


@tensors_checked
def update_(
    z: Sequence[Tensor],
    origin: Tensor | None,
    grads: Sequence[Tensor],
    table: Tensor,
    hyper: Tensor,
    rule: str,
    state: Sequence[Tensor | None] = (),
    *,
    backend: str = "auto",
    **options: Any,
) -> None:
    """Restore and the step of an update rule in one pass, see `fastsam_kernels.reference.update_` (and for `options`).

    Raises ValueError on arguments that do not fit together.
    """
    call = Call("update_", table, hyper, hyper.device)
    dtype = call.update(z, origin, grads, options)
    call.state(rule, state, options.get("steps"), compute_dtype(dtype), table)
    if options.get("shift") is not None:
        call.field("shift", options["shift"], compute_dtype(dtype))
    if options.get("sumsq_v") is not None:
        call.vector("sumsq_v", options["sumsq_v"])
    bind(backend, call.device, dtype).update_(z, origin, grads, table, hyper, rule, state, **options)
