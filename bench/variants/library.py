"""The variants as functions with the names and the meaning of `fastsam_kernels.reference`, on float32 operands.

`build` compiles the sources beside this file with nvcc for one architecture; `OneRead` and `Dependent` call them. No
torch in the library: a call is a `Frame` (frame.h) of addresses, on the current stream.
"""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastsam_kernels import toolchain
from fastsam_kernels.build import NVCC_FLAGS
from fastsam_kernels.columns import WIDTH

HERE = Path(__file__).resolve().parent
SOURCES = ("one_read.cu", "dependent.cu")
LIBRARY = "libfastsam_variants.so"
NOT_SERVED = -1  # frame.h


class NotServed(ValueError):
    """The kernel cannot do this call; the two of the library can."""


def place(arch: str) -> Path:
    """Where `build` puts the library unless told otherwise."""
    return HERE.parent.parent / "build" / "variants" / f"sm_{arch}" / LIBRARY


def build(arch: str, folder: Path | None = None) -> Path:
    """The compiled library for `arch` (such as "90"), in `folder` (default: that of `place`), where a later call
    compiles only what changed.

    Raises `BuildError` without nvcc, or with the compiler's words.
    """
    nvcc, cxx = toolchain.find_nvcc(), toolchain.find_cxx()
    if nvcc is None:
        raise toolchain.BuildError("nvcc is not found: install the CUDA toolkit, or set CUDA_HOME or CUDACXX")
    folder = folder or place(arch).parent
    driver = (nvcc, f"-ccbin={cxx[0]}", f"-gencode=arch=compute_{arch},code=sm_{arch}")
    steps, objects = [], [f"{name}.o" for name in SOURCES]
    for name, output in zip(SOURCES, objects, strict=True):
        argv = (*driver, *NVCC_FLAGS, "-MD", "-MF", f"{output}.d", "-c", str(HERE / name), "-o", output)
        steps.append(toolchain.Step(output, (str(HERE / name),), argv, f"{output}.d"))
    link = (*driver, "-shared", "-cudart=static", *objects, "-o", LIBRARY)
    with toolchain.locked(folder):
        toolchain.execute([*steps, toolchain.Step(LIBRARY, tuple(objects), link)], folder)
    return folder / LIBRARY


class _Field(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("stride", ctypes.c_int64)]


class Frame(ctypes.Structure):
    """`Frame` of frame.h."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("rows", "groups", "segments")),
        *((name, ctypes.c_void_p) for name in ("table", "hyper", "z", "grads", "z_row_stride", "grads_row_stride")),
        ("origin", _Field),
        *((name, ctypes.c_void_p) for name in ("sumsq", "partials", "tickets", "stream")),
    ]


def frame_of(
    table: Tensor, hyper: Tensor, *, z: Sequence[Tensor] = (), grads: Sequence[Tensor] = (), **others: Tensor | None
) -> tuple[Frame, list[Any]]:
    """A frame, and what has to live as long as it. `others`: fields `[rows, stride]`, and memory without strides."""
    if hyper.shape[2] != WIDTH or hyper.dtype != torch.float64 or not hyper.is_contiguous():
        raise ValueError(f"hyper must be contiguous float64 [rows, groups, {WIDTH}], got {hyper.dtype} {hyper.shape}")
    table = table.contiguous()
    frame = Frame(hyper.shape[0], hyper.shape[1], len(table), table.data_ptr(), hyper.data_ptr())
    held: list[Any] = [table, hyper, others]
    for name, tensors in (("z", z), ("grads", grads)):
        if tensors:
            addresses, strides = places(tensors, table, frame.rows)
            setattr(frame, name, ctypes.addressof(addresses))
            setattr(frame, f"{name}_row_stride", ctypes.addressof(strides))
            held += [tensors, addresses, strides]
    for name, tensor in others.items():
        if tensor is not None:
            field = name == "origin"
            _float32(name, tensor) if field else None
            setattr(frame, name, _Field(tensor.data_ptr(), tensor.stride(0)) if field else tensor.data_ptr())
    frame.stream = torch.cuda.current_stream(hyper.device).cuda_stream if hyper.is_cuda else None
    return frame, held


def places(tensors: Sequence[Tensor], table: Tensor, rows: int) -> tuple[Any, Any]:
    """Address of each segment in row 0, and elements from one row to the next, as arrays; of a list of tensors, or of
    one field."""
    for tensor in tensors:
        _float32("a list operand", tensor)
    n = len(table)
    if len(tensors) == 1 and (n != 1 or tensors[0].numel() != rows * int(table[0, 1])):
        start, stride = tensors[0].data_ptr(), tensors[0].stride(0)
        found = [(start + 4 * offset, stride) for offset in table[:, 0].tolist()]
    elif len(tensors) == n:
        found = [(tensor.data_ptr(), tensor.stride(0) if rows > 1 else 0) for tensor in tensors]
    else:
        raise ValueError(f"expected one field or one tensor per segment ({n}), got {len(tensors)} tensors")
    return (ctypes.c_int64 * n)(*(a for a, _ in found)), (ctypes.c_int64 * n)(*(s for _, s in found))


def _float32(name: str, tensor: Tensor) -> None:
    if tensor.dtype != torch.float32:
        raise NotServed(f"the variants take float32, {name} is {tensor.dtype}")


class Variant(ABC):
    """`norm_` and `perturb_` in another way."""

    NAME: str  # of the function, and of what is decided on together
    NOT_SERVED: str  # why it cannot do a call

    def __init__(self, path: Path) -> None:
        self.loaded = ctypes.CDLL(str(path))

    @abstractmethod
    def norm_perturb_(
        self, z: Sequence[Tensor], origin: Tensor, grads: Sequence[Tensor], table: Tensor, hyper: Tensor, sumsq: Tensor
    ) -> None:
        """`norm_(sumsq, grads, [], ...)`, then `perturb_(..., sumsq, save=False)`: the same bits. Raises NotServed
        where it cannot."""

    def _run(self, frame: Frame) -> None:
        error = getattr(self.loaded, f"fastsam_{self.NAME}")(ctypes.byref(frame))
        if error == NOT_SERVED:
            raise NotServed(self.NOT_SERVED)
        if error:
            raise RuntimeError(f"{self.NAME}: CUDA error {error}")


class OneRead(Variant):
    """In one launch, the gradients read once."""

    NAME = "one_read"
    NOT_SERVED = "a row does not fit: its gradients a block's shared memory, or its segments one launch"

    def norm_perturb_(
        self, z: Sequence[Tensor], origin: Tensor, grads: Sequence[Tensor], table: Tensor, hyper: Tensor, sumsq: Tensor
    ) -> None:
        frame, held = frame_of(table, hyper, z=z, grads=grads, origin=origin, sumsq=sumsq)
        self._run(frame)
        del held


class Dependent(Variant):
    """In two launches, of which the second begins while the first ends."""

    NAME = "dependent"
    NOT_SERVED = "dependent launches begin with compute capability 9.0"

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.loaded.fastsam_dependent_partials.restype = ctypes.c_int64
        self._memory: dict[tuple[int, ...], tuple[Tensor, Tensor]] = {}

    def norm_perturb_(
        self, z: Sequence[Tensor], origin: Tensor, grads: Sequence[Tensor], table: Tensor, hyper: Tensor, sumsq: Tensor
    ) -> None:
        frame, held = frame_of(table, hyper, z=z, grads=grads, origin=origin, sumsq=sumsq)
        partials, tickets = self._memory_of(frame, sumsq)
        frame.partials, frame.tickets = partials.data_ptr(), tickets.data_ptr()
        self._run(frame)
        del held

    def _memory_of(self, frame: Frame, sumsq: Tensor) -> tuple[Tensor, Tensor]:
        """Kept from call to call: tickets are zeros again after each, and a graph that was captured needs them to
        stay."""
        count = self.loaded.fastsam_dependent_partials(ctypes.byref(frame))
        return self._memory.setdefault(
            (count, len(sumsq)),
            (sumsq.new_empty(count), torch.zeros(len(sumsq), dtype=torch.int32, device=sumsq.device)),
        )
