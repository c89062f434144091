"""Every op on operands that end, or begin, next to memory that cannot be accessed: `python guard_pages.py BACKEND`.

It runs in a separate process, because an access one element too far ends it (SIGSEGV). `--beyond read|write` makes such
an access on purpose. Padding between segments is NaN, so that reads of it change the results.
"""

import argparse
import ctypes
import itertools
import mmap
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from bench.kernel_cases import LONGS, OPS, Op, Operands, hparams_of
from fastsam import backends
from fastsam.arena import Layout
from fastsam_kernels import reference
from fastsam_kernels.constants import compute_dtype

PAGE = mmap.PAGESIZE
NO_ACCESS = 0  # PROT_NONE
LENGTHS = {
    "aligned": (4096, 16, 8192),  # ends at 16 bytes: wide accesses up to the last page
    "ragged": (33, 0, 4097, 5, 1),
    "long": (20_001,),  # several chunks, and threads
}
STATE = ("q", "momentum", "exp_avg", "exp_avg_sq", "mu", "s", "x")  # fields in the dtype of the arithmetic
_libc = ctypes.CDLL(None, use_errno=True)


class Guarded:
    """Memory between two pages that cannot be accessed; it is freed with this object."""

    def __init__(self, at_end: bool) -> None:
        self.at_end = at_end
        self._maps: list[mmap.mmap] = []

    def tensor(self, count: int, dtype: torch.dtype) -> Tensor:
        """`count` elements of NaN (integers: 0) that end (or begin) at such a page."""
        size = count * dtype.itemsize
        inner = max(-(-size // PAGE), 1) * PAGE
        memory = mmap.mmap(-1, inner + 2 * PAGE)
        self._maps.append(memory)
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        for page in (address, address + PAGE + inner):
            if _libc.mprotect(ctypes.c_void_p(page), ctypes.c_size_t(PAGE), NO_ACCESS):
                raise OSError(ctypes.get_errno(), "mprotect failed")
        start = address + PAGE + (inner - size if self.at_end else 0)
        if not count:
            return torch.empty(0, dtype=dtype)
        tensor = torch.frombuffer((ctypes.c_char * size).from_address(start), dtype=dtype)
        return tensor.fill_(torch.nan if dtype.is_floating_point else 0)

    def field(self, layout: Layout, rows: int, dtype: torch.dtype) -> Tensor:
        """`[rows, end of the last segment]`: random in the segments, NaN between them."""
        end = max(s.offset + s.length for s in layout.segments)
        field = self.tensor(rows * end, dtype).view(rows, end)
        for view in reference.segments([field], layout.table, rows):
            view.copy_(torch.randn(view.shape))
        return field


def operands_of(op: Op, lengths: Sequence[int], rows: int, dtype: torch.dtype, flat: bool, at_end: bool) -> Operands:
    """Return the operands of a call, each between guards."""
    memory, layout = Guarded(at_end), Layout.from_tensors([torch.empty(n, device="meta") for n in lengths])
    compute = compute_dtype(dtype)
    steps, hparams = torch.ones(rows, len(lengths)), hparams_of(op, rows, "cpu", 1.0)
    operands = Operands(memory=memory, table=layout.table, hparams=hparams, steps=steps)
    for name in dict.fromkeys((*op.operands, "params")):
        if name in (*STATE, *LONGS, "backup"):
            state = torch.int64 if name in LONGS else compute
            operands[name] = memory.field(layout, rows, dtype if name == "backup" else state)
            if op.whole:
                operands[name].nan_to_num_()
            if name == "exp_avg_sq":
                operands[name].abs_()
        elif flat:
            operands[name] = [memory.field(layout, rows, dtype)]
        else:
            operands[name] = [memory.tensor(rows * n, dtype).view(rows, n) for n in lengths]
            for tensor in operands[name]:
                tensor.copy_(torch.randn(tensor.shape))
    operands |= {"sumsq": torch.zeros(rows, dtype=torch.float64), "products": torch.zeros(rows, 2, dtype=torch.float64)}
    operands["radius"] = torch.full((rows,), 100.0, dtype=torch.float64)
    return operands


def finite(op: Op, operands: Operands) -> bool:
    """Return True if the op wrote only finite numbers into the segments."""
    sums = operands["sumsq"].isfinite().all() and operands["products"].isfinite().all()
    rows = operands["sumsq"].numel()
    for name in op.writes:
        operand = operands[name] if isinstance(operands[name], list) else [operands[name]]
        sums = sums and all(v.isfinite().all() for v in reference.segments(operand, operands["table"], rows))
    return bool(sums)


def rows_of_a_sum(kernels: Any, rows: int, n: int, dtype: torch.dtype, at_end: bool) -> bool:
    """Return True if `accumulate_` of rows with NaN between them finds only numbers."""
    memory, stride = Guarded(at_end), n + 3
    x = memory.tensor(rows * stride - 3, dtype).as_strided((rows, n), (stride, 1))
    x.copy_(torch.randn(rows, n))
    base, largest = memory.tensor(n, dtype).copy_(torch.randn(n)), memory.tensor(rows, torch.float64)
    high, low = (memory.tensor(n, torch.int64) for _ in range(2))
    kernels.accumulate_(high, low, x, 0.125, base=base, largest_=largest)
    return bool(largest.isfinite().all())


def access_beyond(mode: str) -> None:
    """Access one element too far."""
    memory = Guarded(at_end=True)
    tensor = memory.tensor(5, torch.float32)
    one_more = tensor.as_strided((1,), (1,), 0)
    address = one_more.data_ptr() + 5 * 4
    pointer = ctypes.cast(address, ctypes.POINTER(ctypes.c_float))
    if mode == "read":
        print(pointer[0])
    else:
        pointer[0] = 1.0


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("backend")
    parser.add_argument("--dtypes", default="float32,float64,float16,bfloat16")
    parser.add_argument("--beyond", choices=("read", "write"))
    arguments = parser.parse_args()
    if arguments.beyond:
        access_beyond(arguments.beyond)
        return 0
    kernels = backends.select(arguments.backend, torch.device("cpu"), torch.float32).load()
    is_slow = arguments.backend == "triton"  # an interpreter
    torch.manual_seed(0)
    torch.set_num_threads(1)
    count = 0
    dtypes = [getattr(torch, name) for name in arguments.dtypes.split(",")]
    cases = itertools.product(LENGTHS.items(), (1, 2), dtypes, (True, False), (True, False))
    for (name, lengths), rows, dtype, flat, at_end in cases:
        if is_slow and (rows == 1 or name == "long" or (name == "aligned" and not at_end)):
            continue
        for op in OPS.values():
            if not hasattr(kernels, op.function):
                continue
            operands = operands_of(op, lengths, rows, dtype, flat, at_end)
            torch.set_num_threads(2 if name == "long" else 1)
            op.call(kernels, operands)
            torch.set_num_threads(1)
            if not finite(op, operands):
                print(f"{op.name} read outside of segments: {name}, {rows} rows, {dtype}, flat={flat}, at_end={at_end}")
                return 1
            count += 1
    sums = itertools.product((1, 4, 7), (1, 33, 1024), (torch.float32, torch.float64), (True, False))
    for case in [*sums, *([] if is_slow else [(3, 20_001, torch.float32, True)])]:
        if not rows_of_a_sum(kernels, *case):
            print(f"accumulate_ read outside its rows: {case}")
            return 1
        count += 1
    print(f"{count} calls within bounds")
    return 0


if __name__ == "__main__":
    sys.exit(main())
