"""The checks of an op's arguments: shapes, dtypes, devices and strides, each with an error that says what was expected
and what came."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from fastsam.arena import is_dense
from fastsam_kernels import rules
from fastsam_kernels.columns import WIDTH, Column
from fastsam_kernels.conventions import compute_dtype

P = ParamSpec("P")
R = TypeVar("R")
_OPTIONS = {"g1": "Sequence[Tensor] | None"}  # of the updates, which their signatures do not name
_OPTIONS |= dict.fromkeys(("q", "steps", "sumsq_v", "grad_scale", "found_inf", "shift"), "Tensor | None")


def tensors_checked(op: Callable[P, R]) -> Callable[P, R]:
    """The op, after a look at what its signature calls a tensor or a sequence of tensors.

    Raises TypeError that names an argument that is none, ValueError for a sparse tensor.
    """
    signature = inspect.signature(op)
    kinds = _OPTIONS | {name: str(parameter.annotation) for name, parameter in signature.parameters.items()}

    @functools.wraps(op)
    def checked(*arguments: P.args, **options: P.kwargs) -> R:
        given = signature.bind(*arguments, **options).arguments
        for name, value in (given | given.get("options", {})).items():
            kind = kinds.get(name, "")
            if "Tensor" in kind and (value is not None or not kind.endswith("| None")):
                _check_tensors(op.__name__, name, value, kind)
        return op(*arguments, **options)

    return checked


def _check_tensors(op: str, name: str, value: Any, kind: str) -> None:
    several = kind.startswith("Sequence")
    if several and not isinstance(value, (list, tuple)):
        raise TypeError(f"{op}: {name} must be a list of tensors, got {type(value).__name__}")
    for i, tensor in enumerate(value if several else [value]):
        what = f"{name}[{i}]" if several else name
        if not isinstance(tensor, Tensor):
            if tensor is not None or "Tensor | None]" not in kind:
                raise TypeError(f"{op}: {what} must be a tensor, got {type(tensor).__name__}")
        elif tensor.layout != torch.strided:
            raise ValueError(f"{op}: {what} must be dense (pass tensor.to_dense()), got {tensor.layout}")
        elif tensor.numel() and (needed := _end_of(tensor)) > tensor.untyped_storage().nbytes():
            held = tensor.untyped_storage().nbytes()
            raise ValueError(
                f"{op}: {what} needs {needed} bytes of its storage, which has {held}: was it freed or cut?"
            )


def _end_of(tensor: Tensor) -> int:
    """Bytes of the storage up to the last element."""
    last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return int((tensor.storage_offset() + last + 1) * tensor.element_size())


class Call:
    """The arguments of one call of an op, checked one after the other. Nothing here waits for a GPU.

    Each method raises ValueError when its argument does not fit what was said before: the table says how long the
    segments are, `hyper` (or `rows`, for an op without device scalars) how many rows there are.
    """

    def __init__(self, op: str, table: Tensor, hyper: Tensor | None, device: torch.device, rows: int = 0) -> None:
        self.op, self.device, self.hyper = op, device, hyper
        fits = table.dtype == torch.int64 and table.dim() == 2 and table.shape[1] == 4 and table.device.type == "cpu"
        if not fits or not table.is_contiguous():
            raise self.error("table", "contiguous int64 [segments, 4] on the CPU (Layout.table)", table)
        self.lengths: list[int] = table[:, 1].tolist()
        self.end = max((offset + length for offset, length in table[:, :2].tolist()), default=0)  # beyond 64 bits too
        self._segments(table)
        if hyper is not None:
            fits = hyper.dtype == torch.float64 and hyper.dim() == 3 and hyper.shape[2] == WIDTH
            if not fits or hyper.device != device or not hyper.is_contiguous():
                raise self.error("hyper", f"contiguous float64 [rows, groups, {WIDTH}] on {device}", hyper)
            if self.lengths and int(table[:, 2].max()) >= hyper.shape[1]:
                raise ValueError(
                    f"{op}: table names parameter group {int(table[:, 2].max())} (counted from 0), "
                    f"but hyper has {hyper.shape[1]} groups"
                )
        self.rows = rows if hyper is None else hyper.shape[0]

    def _segments(self, table: Tensor) -> None:
        """Checks that segments are where segments can be."""
        if self.lengths and int(table.min()) < 0:
            raise ValueError(
                f"{self.op}: table has a negative entry; offsets, lengths, groups and slots are counted from 0"
            )
        previous = 0
        for offset, length in sorted(pair for pair in table[:, :2].tolist() if pair[1]):
            if offset < previous:
                raise ValueError(
                    f"{self.op}: segments of the table overlap: one begins at {offset}, another ends at {previous}"
                )
            previous = offset + length

    def error(self, name: str, expected: str, got: Tensor) -> ValueError:
        """The error of an argument that is not as expected."""
        found = f"{got.dtype} {list(got.shape)} with strides {got.stride()} on {got.device}"
        return ValueError(f"{self.op}: {name} must be {expected}, got {found}")

    def adaptive(self) -> bool:
        """Whether a group is adaptive. On a GPU False, since looking would wait for the device."""
        hyper = self.hyper
        return hyper is not None and hyper.device.type == "cpu" and bool((hyper[:, :, Column.ADAPTIVE] != 0).any())

    def vector(self, name: str, tensor: Tensor, dtype: torch.dtype = torch.float64) -> None:
        """One number per row."""
        fits = tensor.dtype == dtype and tensor.shape == (self.rows,) and tensor.device == self.device
        if not fits or not tensor.is_contiguous():
            raise self.error(
                name, f"contiguous {str(dtype).removeprefix('torch.')} [{self.rows}] on {self.device}", tensor
            )

    def pairs(self, name: str, tensor: Tensor) -> None:
        """Two numbers per row."""
        fits = tensor.dtype == torch.float64 and tensor.shape == (self.rows, 2) and tensor.is_contiguous()
        if not fits:
            raise self.error(name, "contiguous float64 [rows, 2]", tensor)

    def scalar(self, name: str, tensor: Tensor | None) -> None:
        """One number for all rows, on the device so that nothing waits for it; None is left out."""
        if tensor is not None and (
            tensor.dtype != torch.float32 or tensor.numel() != 1 or tensor.device != self.device
        ):
            raise self.error(name, f"one float32 number on {self.device}", tensor)

    def state(
        self, rule: str, fields: Sequence[Tensor | None], steps: Tensor | None, dtype: torch.dtype, table: Tensor
    ) -> None:
        """The state of an update rule: its fields, and its steps where it counts them."""
        found = rules.find(rule)
        if len(fields) > len(found.state):
            raise ValueError(f"{self.op}: the state of {rule} has {len(found.state)} fields, got {len(fields)}")
        if (steps is None) == (found.counter is not None):
            raise ValueError(f"{self.op}: {rule} {'counts' if steps is None else 'does not count'} steps")
        for name, field, needed in zip_longest(found.state, fields, found.needed):
            if field is not None:
                self.field(name, field, dtype, written=True)
            elif needed:
                raise ValueError(f"{self.op}: the state of {rule} needs {name}")
        if steps is not None:
            self._counters(steps, table)

    def _counters(self, steps: Tensor, table: Tensor) -> None:
        """The number of steps: one per row and slot."""
        slots = int(table[:, 3].max()) + 1 if self.lengths else 0
        fits = steps.dtype == torch.float32 and steps.dim() == 2 and steps.device == self.device
        if not fits or not steps.is_contiguous() or steps.shape[0] != self.rows or steps.shape[1] < slots:
            raise self.error(
                "steps", f"contiguous float32 [{self.rows}, at least {slots} slots] on {self.device}", steps
            )

    def field(self, name: str, tensor: Tensor, dtype: torch.dtype, master: bool = False, written: bool = False) -> None:
        """A vector `[rows, stride]` that holds every segment. master: float32 will do for half-precision weights."""
        dtypes = sorted({dtype, compute_dtype(dtype)} if master else {dtype}, key=str)
        fits = tensor.dtype in dtypes and tensor.device == self.device and tensor.dim() == 2
        fits = fits and tensor.shape[0] == self.rows and tensor.shape[1] >= self.end and tensor.stride(1) == 1
        if not fits:
            shape = f"[{self.rows}, at least {self.end}] on {self.device} with unit stride"
            raise self.error(name, f"{' or '.join(map(str, dtypes))} {shape}", tensor)
        if written and self.rows > 1 and tensor.stride(0) < self.end:
            raise self.error(name, "of rows that do not overlap", tensor)

    def operand(
        self, name: str, tensors: Sequence[Tensor], dtype: torch.dtype | None = None, written: bool = False
    ) -> torch.dtype:
        """A list operand: one tensor per segment, or one field. Returns its dtype, which must be `dtype` when that is
        given."""
        n = len(self.lengths)
        dtype = dtype or (tensors[0].dtype if tensors else torch.float32)
        if len(tensors) == 1 and (n != 1 or tensors[0].numel() != self.rows * self.lengths[0]):
            self.field(name, tensors[0], dtype, written=written)
            return dtype
        if len(tensors) != n:
            raise ValueError(
                f"{self.op}: {name} must be one tensor per segment ({n}) or one field, got {len(tensors)} tensors"
            )
        for i, (tensor, length) in enumerate(zip(tensors, self.lengths, strict=True)):
            self._scattered(f"{name}[{i}]", tensor, length, dtype, written)
        return dtype

    def _scattered(self, name: str, tensor: Tensor, length: int, dtype: torch.dtype, written: bool) -> None:
        if tensor.dtype != dtype or tensor.device != self.device or tensor.numel() != self.rows * length:
            raise self.error(name, f"{dtype} with {self.rows} x {length} elements on {self.device}", tensor)
        if self.rows == 1 or not length:
            if not is_dense(tensor):
                raise self.error(name, "dense (pass tensor.contiguous())", tensor)
        elif tensor.shape[0] != self.rows or not is_dense(tensor[0]):
            raise self.error(name, f"{self.rows} dense rows in its first dimension", tensor)
        elif written and tensor.stride(0) < length:
            raise self.error(name, "of rows that do not overlap", tensor)

    def same_order(self, name: str, tensors: Sequence[Tensor], other: str, others: Sequence[Tensor]) -> None:
        """Tensors of one shape must have one order of elements in memory: kernels go through them side by side."""
        if len(tensors) != len(others):
            return
        for i, (a, b) in enumerate(zip(tensors, others, strict=True)):
            first = 0 if self.rows == 1 else 1  # the stride between rows may differ
            differ = any(
                x != y for n, x, y in list(zip(a.shape, a.stride(), b.stride(), strict=False))[first:] if n > 1
            )
            if a.shape == b.shape and a.numel() and differ:
                raise ValueError(
                    f"{self.op}: {name}[{i}] and {other}[{i}] have their elements in different orders, strides "
                    f"{a.stride()} and {b.stride()}; pass torch.empty_like({name}[{i}]).copy_({other}[{i}])"
                )

    def update(
        self, z: Sequence[Tensor], origin: Tensor | None, grads: Sequence[Tensor], options: dict[str, Any]
    ) -> torch.dtype:
        """What the updates have in common. Returns the dtype of the weights."""
        dtype = self.operand("z", z, written=True)
        self.operand("grads", grads, dtype)
        self.same_order("z", z, "grads", grads)
        if origin is not None:
            self.field("origin", origin, dtype, master=True, written=bool(options.get("keep")))
        if options.get("g1") is not None:
            self.operand("g1", options["g1"], dtype)
            self.same_order("z", z, "g1", options["g1"])
        if options.get("q") is not None:
            self.field("q", options["q"], compute_dtype(dtype))
        self.scalar("grad_scale", options.get("grad_scale"))
        self.scalar("found_inf", options.get("found_inf"))
        return dtype
