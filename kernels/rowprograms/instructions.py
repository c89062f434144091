"""The instructions of row programs.

A row program is a recorded training pass, applied to one client's row at a time. csrc/rowprograms/program.h reads the
instructions.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from math import prod

DIMS = 4  # largest number of dimensions, without the rows
SHARED = 16  # elements of a row's result after the gradients
NONE, SCRATCH, OUT, FIRST_INPUT = -1, 0, 1, 2  # bases of operands
IGNORED = -100  # a label that does not count

# Largest number of multiplications of a matrix product with which row programs were measured (see
# docs/row_programs.md). Larger products use torch.
MAX_PRODUCTS = 2**25
_INSTRUCTION, _SPARE = 256, 8 * 2**10  # bytes of an instruction, and of sums, constants of the rule and addresses


class NoFormError(ValueError):
    """An error for an operation that a row program cannot have. The message has the reason."""


class Code(IntEnum):
    """Operations, in the order of csrc/rowprograms/program.h. `x` is the instruction's number.

    PRODUCT computes a @ b, plus c; sizes m, k, n. SUM adds up a, over the dimensions in which `out` has a stride of 0.
    LOG_SOFTMAX, its BACKWARD (a: gradient, b: log-softmax), NLL (b: labels) and its BACKWARD have sizes outer, classes,
    inner. IS_NOT is 1 if a label is not x. LOOK_UP (a: table, b: indices) and its BACKWARD (a: gradient of the entries,
    b: indices, x: the entry without gradient) have sizes outer, middle, count, inner. The other operations are
    elementwise.
    """

    PRODUCT = 0
    SUM = 1
    LOG_SOFTMAX = 2
    LOG_SOFTMAX_BACKWARD = 3
    NLL = 4
    NLL_BACKWARD = 5
    IS_NOT = 6
    COPY = 7
    RELU = 8
    NEGATE = 9
    EXPONENTIAL = 10
    LOGARITHM = 11
    ROOT = 12
    INVERSE_ROOT = 13
    MAGNITUDE = 14
    TANH = 15
    SIGMOID = 16
    ADD = 17  # a + x*b
    SCALE = 18  # a * x
    POWER = 19  # a ** x
    MULTIPLY = 20
    DIVIDE = 21
    THRESHOLD_BACKWARD = 22  # a where b > x, else 0
    TANH_BACKWARD = 23  # a * (1 - b^2)
    SIGMOID_BACKWARD = 24  # a * (1 - b) * b
    MULTIPLY_ADD = 25  # a + x*b*c
    ERROR_FUNCTION = 26
    SHIFT = 27  # a + x
    LOOK_UP = 28
    LOOK_UP_BACKWARD = 29


@dataclass(frozen=True)
class RowOperand:
    """An operand: elements of a row.

    Attributes:
        base: SCRATCH, OUT, or FIRST_INPUT plus the number of an input.
        offset: first element.
        strides: strides in elements, at most `DIMS`.
    """

    base: int = NONE
    offset: int = 0
    strides: tuple[int, ...] = ()

    def stride(self, d: int) -> int:
        """Return the stride of dimension d; 0 if the operand has no strides."""
        return self.strides[d] if self.strides else 0


@dataclass(frozen=True)
class Instruction:
    """An operation on a row. `sizes` has a size for each stride of the operands."""

    code: Code
    sizes: tuple[int, ...]
    out: RowOperand
    a: RowOperand
    b: RowOperand = RowOperand()
    c: RowOperand = RowOperand()
    number: float = field(default=0.0, kw_only=True)

    @property
    def operands(self) -> tuple[RowOperand, ...]:
        return self.out, self.a, self.b, self.c

    @property
    def work(self) -> int:
        """Approximate number of multiplications, or of elements."""
        if self.code in (Code.LOOK_UP, Code.LOOK_UP_BACKWARD):
            return prod(self.sizes) // self.sizes[2] + prod(self.sizes[2:])
        return prod(self.sizes)

    def flatten(self) -> Instruction:
        """Return the instruction with as few dimensions as its operands allow, the innermost the densest.

        Raises NoFormError if they are more than `DIMS`.
        """
        dims = [d for d, size in enumerate(self.sizes) if size > 1]
        sizes: list[int] = []
        strides: list[tuple[int, ...]] = []  # strides of all operands, by dimension
        for d in sorted(dims, key=lambda d: (-self.out.stride(d) or -self.a.stride(d), -self.a.stride(d))):
            offsets, size = tuple(o.stride(d) for o in self.operands), self.sizes[d]
            if sizes and strides[-1] == tuple(size * stride for stride in offsets):
                sizes[-1], strides[-1] = sizes[-1] * size, offsets
            else:
                sizes.append(size)
                strides.append(offsets)
        if len(sizes) > DIMS:
            raise NoFormError(f"an operation over {len(sizes)} dimensions, at most {DIMS} are possible")
        operands = [replace(o, strides=tuple(s[i] for s in strides)) for i, o in enumerate(self.operands)]
        return Instruction(self.code, tuple(sizes), *operands, number=self.number)

    def by_classes(self, d: int) -> Instruction:
        """Return the instruction with sizes (outer, classes, inner); `d` is the dimension of the classes.

        Raises NoFormError if a side has more than one dimension.
        """
        n = len(self.sizes)
        if d > 1 or n - d > 2:
            raise NoFormError("classes between more than one dimension on a side")

        def select(values: Sequence[int], default: int) -> tuple[int, ...]:
            return (values[0] if d else default, values[d], values[d + 1] if d + 1 < n else default)

        operands = [replace(o, strides=select(o.strides, 0)) if o.strides else o for o in self.operands]
        return Instruction(self.code, select(self.sizes, 1), *operands)

    def words(self) -> list[int]:
        """Return the words that csrc/rowprograms/program.h reads.

        In elementwise loops and sums, the innermost dimension is the last of four.
        """
        front = self.code in (Code.SUM, Code.IS_NOT) or self.code >= Code.COPY

        def pad(values: Sequence[int], default: int) -> list[int]:
            padding = [default] * (DIMS - len(values))
            return [*padding, *values] if front else [*values, *padding]

        words = [int(self.code), *pad(self.sizes, 1)]
        for operand in self.operands:
            words += [operand.base, operand.offset, *pad(operand.strides, 0)]
        return [*words, int.from_bytes(struct.pack("d", self.number), "little", signed=True)]


@dataclass(frozen=True)
class Input:
    """The form of an input: `[rows, *sizes]`.

    Attributes:
        sizes: sizes of the dimensions after the rows.
        strides: strides of the dimensions after the rows.
        labels: the input has labels.
        one: the input is `sizes`, the same for all rows.
    """

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    labels: bool = False
    one: bool = False

    def words(self) -> list[int]:
        return [self.labels, self.one, len(self.sizes), *self.sizes, *self.strides]


def block_memory(instructions: Sequence[Instruction], inputs: Sequence[Input], scratch: int, width: int) -> int:
    """Return the number of bytes, rounded up, that a row needs in the memory of its block on CUDA while it trains with
    two gradients. See `place_rows` in csrc/cuda/rowprograms.cu, and `RowProgram` in program.py for the arguments."""
    turned = [i.sizes[1] * (i.sizes[2] | 1) for i in instructions if i.code is Code.PRODUCT and i.b.strides[1] != 1]
    values = 2 * width + scratch + max(turned, default=0)
    data = sum(prod(tensor.sizes) * (8 if tensor.labels else 4) for tensor in inputs)
    return 4 * values + data + _INSTRUCTION * len(instructions) + _SPARE
