"""What the Triton kernels share: the cut of the work into chunks, addresses, the two loops over a chunk, conversions, exact division, sums
in a fixed order.

A program works on one chunk (at most `CHUNK` elements of one segment) of one row. The cut depends on the table alone, never on the
number of rows, so a row has the same bits alone and in a batch. The kernels are compiled without fusing multiply and add: their results
are those of the expressions as written, whatever the alignment of the operands makes the compiler do.

A kernel finds its chunk (`locate`), makes its numbers from the device scalars, and hands an op's function to one of the loops: `each_block`
calls it for a block of elements at a time, `add_up` adds up what it adds. The function gets the operands in the order in which the kernel
named them, as pointers to the chunk's first elements (None for what is absent), the numbers, and which elements it is called for.
"""

# The parameters of a kernel are values on the device, which have no Python type.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .columns import OWN as FIRST_OWN
from .columns import Column

CHUNK = tl.constexpr(4096)  # elements per program
# elements per iteration of the elementwise kernels: two 128-bit loads of float32 per thread and operand
BLOCK = tl.constexpr(1024)
LOG2_LANES = tl.constexpr(9)
LANES = tl.constexpr(512)  # partial sums of a chunk: one 128-bit load of float32 per thread and iteration
WARPS = 4
BITS = tl.constexpr(25)  # float32 counts to 2**24

RHO = tl.constexpr(int(Column.RHO))
NU = tl.constexpr(int(Column.NU))
ADAPTIVE = tl.constexpr(int(Column.ADAPTIVE))
ETA = tl.constexpr(int(Column.ETA))
LR = tl.constexpr(int(Column.LR))
DECAY = tl.constexpr(int(Column.DECAY))
PHI = tl.constexpr(int(Column.PHI))
A = tl.constexpr(int(Column.A))
B = tl.constexpr(int(Column.B))
CLIP = tl.constexpr(int(Column.CLIP))
CLIP_FULL = tl.constexpr(int(Column.CLIP_FULL))
PENALTY = tl.constexpr(int(Column.PENALTY))
DECOUPLED = tl.constexpr(int(Column.DECOUPLED))
OWN = tl.constexpr(int(FIRST_OWN))


class Operand(NamedTuple):
    """An operand as a kernel takes it. One that is absent is None."""

    pointer: Any  # to a field `[rows, stride]`, or to int64 `[2, segments]`: addresses of scattered tensors, and what is between their rows
    stride: int  # between the rows of a field
    DTYPE: tl.constexpr  # of the elements


class Chunk(NamedTuple):
    """What a program works on."""

    row: Any
    n_chunks: Any  # of a row
    segment: Any
    segments: Any
    begin: Any  # first element in the segment
    rest: Any  # elements of the segment from there on
    offset: Any  # of the segment in the row
    group: Any
    slot: Any


class Elements(NamedTuple):
    """Which elements of a chunk a function is called for."""

    lane: Any
    rest: Any  # where MASKED, those from this one on are not there
    MASKED: tl.constexpr
    COMPUTE: tl.constexpr  # dtype of the arithmetic


@triton.jit
def locate(plan, n_chunks, segments):
    """This program's chunk."""
    chunks, table = plan
    program = tl.program_id(0)
    row = (program // n_chunks).to(tl.int64)
    chunk = program % n_chunks
    segment = tl.load(chunks + 2 * chunk)
    begin = tl.load(chunks + 2 * chunk + 1)
    record = table + 4 * segment
    offset, rest = tl.load(record), tl.load(record + 1) - begin
    group, slot = tl.load(record + 2), tl.load(record + 3)
    return Chunk(row, n_chunks, segment, segments, begin, rest, offset, group, slot)


@triton.jit
def columns(hyper, chunk):
    """Pointer to the device scalars of the chunk's row and group."""
    scalars, row_stride, group_stride = hyper
    return scalars + chunk.row * row_stride + chunk.group * group_stride


# Triton's interpreter truncates float32 to bfloat16 and spoils subnormal numbers, so there the bits are converted by hand.
INTERPRETED = tl.constexpr(not isinstance(locate, triton.runtime.JITFunction))


@triton.jit
def first_element(operand, chunk, ALIGNED: tl.constexpr):
    """Pointer to an operand's first element in the chunk."""
    if operand.pointer.dtype.element_ty == operand.DTYPE:
        base = operand.pointer
        start = chunk.row * operand.stride + chunk.offset + chunk.begin
    else:
        base = tl.load(operand.pointer + chunk.segment).to(tl.pointer_type(operand.DTYPE))
        start = chunk.row * tl.load(operand.pointer + chunk.segments + chunk.segment) + chunk.begin
        if ALIGNED:
            base = tl.multiple_of(base, 16)
    if ALIGNED:
        start = tl.multiple_of(start, 16)
    return base + start


@triton.jit
def each_block(FUNCTION: tl.constexpr, operands, numbers, chunk, COMPUTE: tl.constexpr, ALIGNED: tl.constexpr):
    """Calls `FUNCTION(operands, numbers, at)` for every block of the chunk."""
    operands = [first_element(x, chunk, ALIGNED) if x is not None else None for x in operands]
    lane = tl.arange(0, BLOCK)
    if chunk.rest >= CHUNK:
        for start in tl.static_range(0, CHUNK, BLOCK):
            FUNCTION(operands, numbers, Elements(start + lane, chunk.rest, False, COMPUTE))
    else:
        start = 0
        while start < chunk.rest:
            FUNCTION(operands, numbers, Elements(start + lane, chunk.rest, True, COMPUTE))
            start += BLOCK


@triton.jit
def add_up(FUNCTION: tl.constexpr, totals, operands, numbers, chunk, COMPUTE: tl.constexpr, ALIGNED: tl.constexpr):
    """What is left of `totals`, sums by lane, after `totals = FUNCTION(totals, operands, numbers, at)` for all elements of the chunk."""
    operands = [first_element(x, chunk, ALIGNED) if x is not None else None for x in operands]
    lane = tl.arange(0, LANES)
    if chunk.rest >= CHUNK:
        for start in tl.static_range(0, CHUNK, LANES):
            totals = FUNCTION(totals, operands, numbers, Elements(start + lane, chunk.rest, False, COMPUTE))
    else:
        start = 0
        while start < chunk.rest:
            totals = FUNCTION(totals, operands, numbers, Elements(start + lane, chunk.rest, True, COMPUTE))
            start += LANES
    return totals


@triton.jit
def load(base, at):
    """Elements of what begins at `base`, as they are stored; those that are not there are not read and are 0."""
    return tl.load(base + at.lane, mask=at.lane < at.rest, other=0) if at.MASKED else tl.load(base + at.lane)


@triton.jit
def read(base, at):
    """`load`, in the dtype of the arithmetic."""
    return widen(load(base, at), at.COMPUTE)


@triton.jit
def _limit_if(condition, at):
    """The number of elements of a chunk that are touched: none where the (scalar) condition is false."""
    # The length of a whole chunk is a multiple of 16 and known to the compiler: accesses stay 128 bits wide.
    return tl.where(condition, at.rest if at.MASKED else CHUNK, 0)


@triton.jit
def read_if(condition, base, at):
    """Like `read`; reads nothing where the (scalar) condition is false."""
    return widen(tl.load(base + at.lane, mask=at.lane < _limit_if(condition, at), other=0), at.COMPUTE)


@triton.jit
def store(base, at, x):
    """Writes elements of what begins at `base`, rounded to its dtype, except those that are not there."""
    x = narrow(x, base.dtype.element_ty)
    if at.MASKED:
        tl.store(base + at.lane, x, mask=at.lane < at.rest)
    else:
        tl.store(base + at.lane, x)


@triton.jit
def store_if(condition, base, at, x):
    """Like `store`; writes nothing where the (scalar) condition is false."""
    tl.store(base + at.lane, narrow(x, base.dtype.element_ty), mask=at.lane < _limit_if(condition, at))


@triton.jit
def inverse(grad_scale):
    """`1/grad_scale` in float64, 1 without a scale."""
    return tl.full([], 1.0, tl.float64) if grad_scale is None else 1.0 / tl.load(grad_scale).to(tl.float64)


@triton.jit
def running(found_inf):
    """False where this step is only a restore."""
    return tl.full([], 1, tl.int1) if found_inf is None else tl.load(found_inf) == 0


@triton.jit
def widen(x, COMPUTE: tl.constexpr):
    """From storage to the dtype of the arithmetic: exact."""
    if INTERPRETED and x.dtype == tl.bfloat16:
        x = (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    return x.to(COMPUTE)


@triton.jit
def narrow(x, DTYPE: tl.constexpr):
    """From the dtype of the arithmetic to storage, to nearest, ties to even."""
    if INTERPRETED and tl.bfloat16 == DTYPE and x.dtype != DTYPE:
        bits = x.to(tl.uint32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        y = tl.where(x == x, bits, 0x7FC0).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        y = x.to(DTYPE)
    return y


@triton.jit
def divide(x, y):
    """`x / y`, correctly rounded (Triton's own `/` of float32 is not)."""
    return x / y if x.dtype == tl.float64 else tl.div_rn(x, y)


@triton.jit
def root(x):
    """The square root, correctly rounded (Triton's own of float32 is not)."""
    return tl.sqrt(x) if x.dtype == tl.float64 else tl.sqrt_rn(x)


@triton.jit
def power(base, exponent):
    """`base**exponent` in float64 for a whole exponent below 2**25, by squaring."""
    result = tl.full(base.shape, 1.0, tl.float64)
    bits = exponent.to(tl.int32)
    for _ in tl.static_range(BITS):
        result = tl.where((bits & 1) != 0, result * base, result)
        base = base * base
        bits = bits >> 1
    return result


@triton.jit
def pairwise_sum(x, STEPS: tl.constexpr):
    """Sum of `2**STEPS` numbers: halves are added until one is left.

    A plain `tl.sum` adds in an order that depends on which thread holds what, hence on the alignment of what was loaded.
    """
    for _ in tl.static_range(STEPS):
        x = tl.sum(tl.reshape(x, [2, x.shape[0] // 2]), 0)
    return tl.sum(x, 0)
