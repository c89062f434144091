"""The op surface: every argument is checked once here, a backend is chosen, and it is called.

The functions have the names, arguments and meaning of `fastsam_kernels.reference`, plus `backend=`. Callers that checked their buffers
when they made them (the optimizer, the executors) call `bind(...)` once and skip the checks in every step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from fastsam_kernels.columns import WIDTH

from . import backends


class Kernels(Protocol):
    """What every backend module offers; see `fastsam_kernels.reference` for the meaning."""

    def norm_(self, sumsq: Tensor, grads: Sequence[Tensor], weights: Sequence[Tensor], table: Tensor, hyper: Tensor, accumulate: bool = False) -> None: ...
    def perturb_(self, z: Sequence[Tensor], origin: Tensor, grads: Sequence[Tensor], table: Tensor, hyper: Tensor, sumsq: Tensor, save: bool) -> None: ...
    def restore_(self, z: Sequence[Tensor], origin: Tensor, table: Tensor) -> None: ...
    def update_norm_(self, sumsq: Tensor, z: Sequence[Tensor], origin: Tensor | None, grads: Sequence[Tensor], table: Tensor, hyper: Tensor, **options: Any) -> None: ...
    def update_sgd_(self, z: Sequence[Tensor], origin: Tensor | None, grads: Sequence[Tensor], table: Tensor, hyper: Tensor, **options: Any) -> None: ...
    def update_adam_(
        self, z: Sequence[Tensor], origin: Tensor | None, grads: Sequence[Tensor], table: Tensor, hyper: Tensor,
        exp_avg: Tensor, exp_avg_sq: Tensor, steps: Tensor, **options: Any,
    ) -> None: ...


def bind(backend: str, device: torch.device, dtype: torch.dtype) -> Kernels:
    """The kernels that serve `dtype` on `device`, without the checks of this module.

    Raises ValueError and RuntimeError as `fastsam.backends.select` does.
    """
    return cast(Kernels, backends.select(backend, device, dtype).load())


def norm_(sumsq: Tensor, grads: Sequence[Tensor], weights: Sequence[Tensor], table: Tensor, hyper: Tensor, accumulate: bool = False, *, backend: str = "auto") -> None:
    """`sumsq[r] (+)= ||T*g||^2`, see `fastsam_kernels.reference.norm_`. Raises ValueError on arguments that do not fit together."""
    call = _Call("norm_", table, hyper, sumsq.device)
    call.vector("sumsq", sumsq)
    dtype = call.operand("grads", grads)
    if weights or call.adaptive():
        call.operand("weights", weights, dtype)
    _kernels(backend, sumsq.device, dtype).norm_(sumsq, grads, weights, table, hyper, accumulate)


def perturb_(z: Sequence[Tensor], origin: Tensor, grads: Sequence[Tensor], table: Tensor, hyper: Tensor, sumsq: Tensor, save: bool, *, backend: str = "auto") -> None:
    """Moves `z` to the perturbed point, see `fastsam_kernels.reference.perturb_`. Raises ValueError on arguments that do not fit together."""
    call = _Call("perturb_", table, hyper, origin.device)
    dtype = call.operand("z", z)
    call.operand("grads", grads, dtype)
    call.field("origin", origin, dtype, master=True)
    call.vector("sumsq", sumsq)
    _kernels(backend, origin.device, dtype).perturb_(z, origin, grads, table, hyper, sumsq, save)


def restore_(z: Sequence[Tensor], origin: Tensor, table: Tensor, *, backend: str = "auto") -> None:
    """`z = origin`, bit for bit, see `fastsam_kernels.reference.restore_`. Raises ValueError on arguments that do not fit together."""
    call = _Call("restore_", table, None, origin.device, rows=origin.shape[0])
    dtype = call.operand("z", z)
    call.field("origin", origin, dtype, master=True)
    _kernels(backend, origin.device, dtype).restore_(z, origin, table)


def update_norm_(sumsq: Tensor, z: Sequence[Tensor], origin: Tensor | None, grads: Sequence[Tensor], table: Tensor, hyper: Tensor, *, backend: str = "auto", **options: Any) -> None:
    """The squared norm that clipping looks at, see `fastsam_kernels.reference.update_norm_`. Raises ValueError on arguments that do not fit together."""
    call = _Call("update_norm_", table, hyper, sumsq.device)
    call.vector("sumsq", sumsq)
    dtype = call.update(z, origin, grads, options)
    _kernels(backend, sumsq.device, dtype).update_norm_(sumsq, z, origin, grads, table, hyper, **options)


def update_sgd_(z: Sequence[Tensor], origin: Tensor | None, grads: Sequence[Tensor], table: Tensor, hyper: Tensor, *, backend: str = "auto", **options: Any) -> None:
    """Restore and SGD step in one pass, see `fastsam_kernels.reference.update_sgd_`. Raises ValueError on arguments that do not fit together."""
    call = _Call("update_sgd_", table, hyper, table.device if not z else z[0].device)
    dtype = call.update(z, origin, grads, options)
    if options.get("momentum") is not None:
        call.field("momentum", options["momentum"], compute_dtype(dtype))
    if options.get("sumsq_v") is not None:
        call.vector("sumsq_v", options["sumsq_v"])
    _kernels(backend, call.device, dtype).update_sgd_(z, origin, grads, table, hyper, **options)


def update_adam_(
    z: Sequence[Tensor], origin: Tensor | None, grads: Sequence[Tensor], table: Tensor, hyper: Tensor,
    exp_avg: Tensor, exp_avg_sq: Tensor, steps: Tensor, *, backend: str = "auto", **options: Any,
) -> None:
    """Restore and Adam(W) step in one pass, see `fastsam_kernels.reference.update_adam_`. Raises ValueError on arguments that do not fit together."""
    call = _Call("update_adam_", table, hyper, exp_avg.device)
    dtype = call.update(z, origin, grads, options)
    call.field("exp_avg", exp_avg, compute_dtype(dtype))
    call.field("exp_avg_sq", exp_avg_sq, compute_dtype(dtype))
    if steps.dtype != torch.float32 or steps.shape[0] != call.rows or (table.shape[0] and steps.shape[1] <= int(table[:, 3].max())):
        raise call.error("steps", f"float32 [{call.rows}, slots]", steps)
    _kernels(backend, call.device, dtype).update_adam_(z, origin, grads, table, hyper, exp_avg, exp_avg_sq, steps, **options)


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the arithmetic and of the state for weights of `dtype`: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _kernels(backend: str, device: torch.device, dtype: torch.dtype) -> Kernels:
    return bind(backend, device, dtype)


class _Call:
    """The arguments of one call, checked one after the other."""

    def __init__(self, op: str, table: Tensor, hyper: Tensor | None, device: torch.device, rows: int = 0) -> None:
        self.op, self.device, self.hyper = op, device, hyper
        if table.dtype != torch.int64 or table.dim() != 2 or table.shape[1] != 4 or table.device.type != "cpu":
            raise self.error("table", "int64 [segments, 4] on the CPU (Layout.table)", table)
        self.lengths, self.end = table[:, 1].tolist(), int((table[:, 0] + table[:, 1]).max()) if table.shape[0] else 0
        if table.shape[0] and int(table.min()) < 0:
            raise ValueError(f"{op}: table has a negative entry; offsets, lengths, groups and slots are counted from 0")
        if hyper is not None:
            if hyper.dtype != torch.float64 or hyper.dim() != 3 or hyper.shape[2] != WIDTH or hyper.device != device:
                raise self.error("hyper", f"float64 [rows, groups, {WIDTH}] on {device}", hyper)
            if table.shape[0] and int(table[:, 2].max()) >= hyper.shape[1]:
                raise ValueError(f"{op}: table names parameter group {int(table[:, 2].max())}, hyper has {hyper.shape[1]} groups")
        self.rows = rows if hyper is None else hyper.shape[0]

    def error(self, name: str, expected: str, got: Tensor) -> ValueError:
        return ValueError(f"{self.op}: {name} must be {expected}, got {got.dtype} {list(got.shape)} on {got.device}")

    def adaptive(self) -> bool:
        from fastsam_kernels.columns import Column

        return self.hyper is not None and bool((self.hyper[:, :, Column.ADAPTIVE] != 0).any())

    def vector(self, name: str, tensor: Tensor) -> None:
        if tensor.dtype != torch.float64 or tensor.shape != (self.rows,) or tensor.device != self.device:
            raise self.error(name, f"float64 [{self.rows}] on {self.device}", tensor)

    def field(self, name: str, tensor: Tensor, dtype: torch.dtype, master: bool = False) -> None:
        dtypes = {dtype, compute_dtype(dtype)} if master else {dtype}
        fits = tensor.dtype in dtypes and tensor.device == self.device and tensor.dim() == 2 and tensor.stride(1) == 1
        if not fits or tensor.shape[0] != self.rows or tensor.shape[1] < self.end:
            raise self.error(name, f"{' or '.join(map(str, dtypes))} [{self.rows}, at least {self.end}] on {self.device} with unit stride", tensor)

    def operand(self, name: str, tensors: Sequence[Tensor], dtype: torch.dtype | None = None) -> torch.dtype:
        """Checks a list operand; returns its dtype."""
        dtype = dtype or (tensors[0].dtype if tensors else torch.float32)
        if len(tensors) == 1 and tensors[0].dim() == 2 and tensors[0].numel() != self.rows * sum(self.lengths):
            self.field(name, tensors[0], dtype)
            return dtype
        if len(tensors) != len(self.lengths):
            raise ValueError(f"{self.op}: {name} must be one tensor per segment ({len(self.lengths)}) or one field, got {len(tensors)} tensors")
        for i, (tensor, length) in enumerate(zip(tensors, self.lengths, strict=True)):
            if tensor.dtype != dtype or tensor.device != self.device or tensor.numel() != self.rows * length:
                raise self.error(f"{name}[{i}]", f"{dtype} with {self.rows} x {length} elements on {self.device}", tensor)
        return dtype

    def update(self, z: Sequence[Tensor], origin: Tensor | None, grads: Sequence[Tensor], options: dict[str, Any]) -> torch.dtype:
        dtype = self.operand("z", z)
        self.operand("grads", grads, dtype)
        if origin is not None:
            self.field("origin", origin, dtype, master=True)
        if options.get("g1") is not None:
            self.operand("g1", options["g1"], dtype)
        if options.get("q") is not None:
            self.field("q", options["q"], compute_dtype(dtype))
        return dtype
