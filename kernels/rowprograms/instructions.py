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

DIMS = 4  # behind the rows
SHARED = 16  # elements of a row's result behind the gradients
NONE, SCRATCH, OUT, FIRST_INPUT = -1, 0, 1, 2  # bases of operands
IGNORED = -100  # a label that does not count

# Multiplications of a product of two matrices, up to which row programs were measured (see docs/row_programs.md); torch
# has its own for larger ones.
MOST = 2**25


class NoFormError(ValueError):
    """An operation cannot be one of a row program; the message says why."""


class Code(IntEnum):
    """Operations, in the order of csrc/rowprograms/program.h. `x`: the instruction's number.

    PRODUCT: sizes m, k, n; a @ b, plus c. SUM: of a, over the dimensions in which `out` has a stride of 0. LOG_SOFTMAX,
    its BACKWARD (a: gradient, b: log-softmax), NLL (b: labels) and its BACKWARD: sizes outer, classes, inner. IS_NOT: 1
    where a label is not x. The others are elementwise.
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


@dataclass(frozen=True)
class Operand:
    """Elements of a row. base: SCRATCH, OUT, or FIRST_INPUT and on. offset, strides: in elements, at most `DIMS`
    strides."""

    base: int = NONE
    offset: int = 0
    strides: tuple[int, ...] = ()

    def along(self, d: int) -> int:
        """Its stride; 0 where it has none."""
        return self.strides[d] if self.strides else 0


@dataclass(frozen=True)
class Instruction:
    """One operation on a row. sizes: as many as the operands have strides."""

    code: Code
    sizes: tuple[int, ...]
    out: Operand
    a: Operand
    b: Operand = Operand()
    c: Operand = Operand()
    number: float = field(default=0.0, kw_only=True)

    @property
    def operands(self) -> tuple[Operand, ...]:
        return self.out, self.a, self.b, self.c

    @property
    def work(self) -> int:
        """Multiplications, or elements, about."""
        return prod(self.sizes)

    def flattened(self) -> Instruction:
        """With as few dimensions as the operands allow, the innermost the densest. Raises NoFormError for more than
        `DIMS` of them."""
        many = [d for d, size in enumerate(self.sizes) if size > 1]
        sizes: list[int] = []
        strides: list[tuple[int, ...]] = []  # by dimension, of all operands
        for d in sorted(many, key=lambda d: (-self.out.along(d) or -self.a.along(d), -self.a.along(d))):
            own, size = tuple(o.along(d) for o in self.operands), self.sizes[d]
            if sizes and strides[-1] == tuple(size * stride for stride in own):
                sizes[-1], strides[-1] = sizes[-1] * size, own
            else:
                sizes.append(size)
                strides.append(own)
        if len(sizes) > DIMS:
            raise NoFormError(f"an operation over {len(sizes)} dimensions, at most {DIMS} are possible")
        placed = [replace(o, strides=tuple(s[i] for s in strides)) for i, o in enumerate(self.operands)]
        return Instruction(self.code, tuple(sizes), *placed, number=self.number)

    def by_classes(self, d: int) -> Instruction:
        """Sizes (outer, classes, inner); d: the dimension of the classes. Raises NoFormError where there is more than
        one on a side."""
        n = len(self.sizes)
        if d > 1 or n - d > 2:
            raise NoFormError("classes between more than one dimension on a side")

        def taken(values: Sequence[int], other: int) -> tuple[int, ...]:
            return (values[0] if d else other, values[d], values[d + 1] if d + 1 < n else other)

        placed = [replace(o, strides=taken(o.strides, 0)) if o.strides else o for o in self.operands]
        return Instruction(self.code, taken(self.sizes, 1), *placed)

    def words(self) -> list[int]:
        """As csrc/rowprograms/program.h reads it. Elementwise loops and sums have their innermost dimension last of
        four."""
        front = self.code in (Code.SUM, Code.IS_NOT) or self.code >= Code.COPY

        def filled(values: Sequence[int], with_: int) -> list[int]:
            rest = [with_] * (DIMS - len(values))
            return [*rest, *values] if front else [*values, *rest]

        found = [int(self.code), *filled(self.sizes, 1)]
        for operand in self.operands:
            found += [operand.base, operand.offset, *filled(operand.strides, 0)]
        return [*found, int.from_bytes(struct.pack("d", self.number), "little", signed=True)]


@dataclass(frozen=True)
class Input:
    """What a program expects of an input, `[rows, *sizes]` with these strides behind the rows; one: `sizes`, the same
    for all rows."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    labels: bool = False
    one: bool = False

    def words(self) -> list[int]:
        return [self.labels, self.one, len(self.sizes), *self.sizes, *self.strides]
