"""The loops over a chunk in which all ops but one run, and the access to its elements.

A program works on one chunk (at most `CHUNK` elements of one segment) of one row. The cut depends only on the table,
not on the number of rows. So a row has the same bits in a batch and without other rows.

A kernel finds its chunk (`locate`), computes its numbers from the device scalars (`hparams`), and passes the op's
function to a loop. `each_block` calls it for one block of elements at a time, `add_up` for terms of sums. Its arguments
are the operands in the kernel's order, the numbers, and the elements of the call (`Elements`). An operand is a pointer
to the chunk's first element, or None if it is absent. Constants are put into a tuple only in the call itself: Triton
3.6 turns them into values if the tuple gets a name.

The last chunk of a segment uses a `while` loop, because Triton 3.6's interpreter takes no range of device values.
"""

# The parameters of a kernel are values on the device, which have no Python type.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from collections import namedtuple
from typing import Any, NamedTuple

import triton
import triton.language as tl

from .hparams import HParam
from .triton_common import LANES, narrow, widen

CHUNK = tl.constexpr(4096)  # elements per program
# elements per iteration of the elementwise kernels: two 128-bit loads of float32 per thread and operand
BLOCK = tl.constexpr(1024)


class Operand(NamedTuple):
    """An operand in the form that a kernel takes. An absent operand is None."""

    # pointer to a field `[rows, row_size]`, or to int64 `[2, segments]`: addresses and row strides of scattered tensors
    pointer: Any
    stride: Any  # stride between the rows of a field
    DTYPE: tl.constexpr  # dtype of the elements


class Chunk(NamedTuple):
    """The work of a program: one chunk of one row."""

    row: Any
    n_chunks: Any  # chunks of a row
    segment: Any
    segments: Any
    begin: Any  # first element in the segment
    num_elements: Any  # elements of the segment from there on
    offset: Any  # offset of the segment in the row
    group: Any
    slot: Any


class Elements(NamedTuple):
    """The elements of a chunk for which a function is called."""

    lane: Any
    end: Any  # if MASKED, elements from this one on are beyond the segment
    MASKED: tl.constexpr
    COMPUTE: tl.constexpr  # dtype of the arithmetic


@triton.jit
def locate(plan, n_chunks, segments):
    """Return this program's chunk."""
    chunks, table = plan
    program = tl.program_id(0)
    row = (program // n_chunks).to(tl.int64)
    chunk = program % n_chunks
    segment = tl.load(chunks + 2 * chunk)
    begin = tl.load(chunks + 2 * chunk + 1)
    record = table + 4 * segment
    offset, num_elements = tl.load(record), tl.load(record + 1) - begin
    group, slot = tl.load(record + 2), tl.load(record + 3)
    return Chunk(row, n_chunks, segment, segments, begin, num_elements, offset, group, slot)


Columns = namedtuple("Columns", [*(column.name.lower() for column in HParam), "rule_hparams"])  # type: ignore[misc]


@triton.jit
def columns(hparams, chunk):
    """Return the device scalars of the chunk's row and group, by the names of `HParam`; unused columns are not read."""
    scalars, row_stride, group_stride = hparams
    h = scalars + chunk.row * row_stride + chunk.group * group_stride
    return Columns(  # type: ignore[call-arg]
        tl.load(h), tl.load(h + 1), tl.load(h + 2), tl.load(h + 3), tl.load(h + 4), tl.load(h + 5), tl.load(h + 6),
        tl.load(h + 7), tl.load(h + 8), tl.load(h + 9), tl.load(h + 10), tl.load(h + 11), tl.load(h + 12),
        rule_hparams=(tl.load(h + 13), tl.load(h + 14), tl.load(h + 15), tl.load(h + 16)),
    )  # fmt: skip


@triton.jit
def first_element(operand, chunk, ALIGNED: tl.constexpr):
    """Return a pointer to an operand's first element in the chunk."""
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
    """Call `FUNCTION(operands, numbers, elements)` for every block of the chunk."""
    operands = [first_element(x, chunk, ALIGNED) if x is not None else None for x in operands]
    lane = tl.arange(0, BLOCK)
    if chunk.num_elements >= CHUNK:
        for start in tl.static_range(0, CHUNK, BLOCK):
            FUNCTION(operands, numbers, Elements(start + lane, chunk.num_elements, False, COMPUTE))
    else:
        start = 0
        while start < chunk.num_elements:
            FUNCTION(operands, numbers, Elements(start + lane, chunk.num_elements, True, COMPUTE))
            start += BLOCK


@triton.jit
def add_up(
    FUNCTION: tl.constexpr, COUNT: tl.constexpr, operands, numbers, chunk, COMPUTE: tl.constexpr, ALIGNED: tl.constexpr
):
    """Return COUNT sums per lane over all elements of the chunk.

    Sums start at zero and are computed by `totals = FUNCTION(totals, operands, numbers, elements)`.
    """
    operands = [first_element(x, chunk, ALIGNED) if x is not None else None for x in operands]
    lane = tl.arange(0, LANES)
    totals = (tl.zeros([LANES], dtype=COMPUTE),) * COUNT
    if chunk.num_elements >= CHUNK:
        for start in tl.static_range(0, CHUNK, LANES):
            totals = FUNCTION(totals, operands, numbers, Elements(start + lane, chunk.num_elements, False, COMPUTE))
    else:
        start = 0
        while start < chunk.num_elements:
            totals = FUNCTION(totals, operands, numbers, Elements(start + lane, chunk.num_elements, True, COMPUTE))
            start += LANES
    return totals


@triton.jit
def load(base, elements):
    """Return elements from `base` on, in their storage dtype. Elements beyond the segment are not read and are 0."""
    return (
        tl.load(base + elements.lane, mask=elements.lane < elements.end, other=0)
        if elements.MASKED
        else tl.load(base + elements.lane)
    )


@triton.jit
def read(base, elements):
    """Return the result of `load` in the dtype of the arithmetic."""
    return widen(load(base, elements), elements.COMPUTE)


@triton.jit
def _limit_if(condition, elements):
    """Return the number of elements of a chunk that are accessed: 0 if the (scalar) condition is false."""
    # The length of a whole chunk is a multiple of 16 and known to the compiler: accesses stay 128 bits wide.
    return tl.where(condition, elements.end if elements.MASKED else CHUNK, 0)


@triton.jit
def read_if(condition, base, elements):
    """Return the result of `read`; if the (scalar) condition is false, read nothing."""
    return widen(
        tl.load(base + elements.lane, mask=elements.lane < _limit_if(condition, elements), other=0), elements.COMPUTE
    )


@triton.jit
def store(base, elements, x):
    """Write elements from `base` on, rounded to its dtype, except elements beyond the segment."""
    x = narrow(x, base.dtype.element_ty)
    if elements.MASKED:
        tl.store(base + elements.lane, x, mask=elements.lane < elements.end)
    else:
        tl.store(base + elements.lane, x)


@triton.jit
def store_if(condition, base, elements, x):
    """Write as `store` does; if the (scalar) condition is false, write nothing."""
    tl.store(
        base + elements.lane, narrow(x, base.dtype.element_ty), mask=elements.lane < _limit_if(condition, elements)
    )
