"""Inputs for the tests of the ops: drawn layouts and values, placed in memory between guard bands.

An operand's values are kept in a canonical form: a field `[rows, row_size]` of which only the segments of the table
have a meaning. `Memory` places them as an op expects them (a field, or scattered tensors; aligned or not), and checks
later which elements have changed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from fastsam import backends
from fastsam_kernels import reference, rules
from fastsam_kernels.constants import compute_dtype
from fastsam_kernels.hparams import FIRST_RULE_HPARAM, NUM_HPARAMS, HParam
from fastsam_kernels.rules import adam, sgd
from tests.helpers.tolerances import TOLERANCE

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
GUARD = 64  # elements before and after every buffer
LENGTHS = (0, 1, 2, 15, 16, 17, 130, 1025)
LONG = (4095, 4096, 4097, 8193)  # about a chunk of one backend or another


def parameter(b: backends.Backend, *more_marks: Any) -> Any:
    """Return a backend as a parameter of a test.

    Triton's interpreter takes a second per step, so it runs together with the GPU code.
    """
    interpreter = (b.name, b.device) == ("triton", "cpu")
    marks = [pytest.mark.gpu_code] if interpreter else [pytest.mark.gpu] if b.device == "cuda" else []
    skip_mark = pytest.mark.skipif(not b.available, reason=f"{b.name} on {b.device}: {b.reason}")
    return pytest.param(b, id=f"{b.name}-{b.device}", marks=[skip_mark, *marks, *more_marks])


BACKENDS = [parameter(b) for b in backends.table()]


def explore(backend: backends.Backend, examples: int = 24) -> Callable[[Any], Any]:
    """Return the settings of a property test, with the same examples in every run.

    Triton's interpreter is slow, and the reference is compared with itself, so both have fewer examples.
    """
    divisor = {("triton", "cpu"): 5, ("reference", "cpu"): 2}.get((backend.name, backend.device), 1)
    count = max(5, examples // divisor)
    return settings(max_examples=count, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


def property_test(*strategies: Any, examples: int = 24) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that makes a test over all backends of a function of a backend and of drawn values.

    Args:
        strategies: one strategy of hypothesis for each value after the backend.
        examples (int): number of examples on a fast backend, as in `explore`.
    """

    def decorate(holds: Callable[..., None]) -> Callable[..., None]:
        @pytest.mark.parametrize("backend", BACKENDS)
        def test(backend: backends.Backend) -> None:
            @explore(backend, examples)
            @given(st.tuples(*strategies))
            def check(values: tuple[Any, ...]) -> None:
                holds(backend, *values)

            check()

        test.__name__, test.__doc__ = holds.__name__, holds.__doc__
        return test

    return decorate


@dataclass(frozen=True)
class Case:
    """A layout and a way of placing operands."""

    rows: int
    table: Tensor
    groups: int
    dtype: torch.dtype
    master: bool  # `backup` is a float32 copy of half-precision weights
    scattered: dict[str, bool]  # per list operand
    shift: int  # elements between an aligned address and every buffer
    gap: int  # elements between the rows of a field, and of a scattered tensor
    seed: int
    batch_row: tuple[int, int] | None = None  # (r, n): the one row is row r of a case of n rows

    def row(self, r: int) -> Case:
        """Return row `r` as a separate case with the same values."""
        return replace(self, rows=1, batch_row=(r, self.rows))

    def _rows(self, values: Tensor) -> Tensor:
        return values if self.batch_row is None else values[self.batch_row[0] : self.batch_row[0] + 1]

    @property
    def _num_rows(self) -> int:
        return self.rows if self.batch_row is None else self.batch_row[1]

    @property
    def stride(self) -> int:
        return max(int((self.table[:, 0] + self.table[:, 1]).max()) if len(self.table) else 0, 1)

    @property
    def compute(self) -> torch.dtype:
        return compute_dtype(self.dtype)

    @property
    def backup_dtype(self) -> torch.dtype:
        return self.compute if self.master else self.dtype

    def generator(self, name: str) -> torch.Generator:
        return torch.Generator().manual_seed(self.seed * 1000 + sum(map(ord, name)))

    def values(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """Return random values of order 1, in canonical form, that `dtype` can hold."""
        values = torch.randn(self._num_rows, self.stride, dtype=torch.float64, generator=self.generator(name))
        return self._rows(values).to(dtype or self.dtype)

    def sums(self) -> Tensor:
        """Return a sum of squares per row."""
        return self._rows(torch.rand(self._num_rows, dtype=torch.float64, generator=self.generator("sums")) * 100 + 1)

    def seeds(self) -> Tensor:
        """Return a seed of 64 bits per row."""
        return self._rows(torch.randint(-(2**62), 2**62, (self._num_rows,), generator=self.generator("seeds")))

    def mask(self) -> Tensor:
        """Return the mask of the elements of the canonical form that are in a segment."""
        mask = torch.zeros(self.rows, self.stride, dtype=torch.bool)
        for offset, length, _, _ in self.table.tolist():
            mask[:, offset : offset + length] = True
        return mask

    def hparams(self, rule: str = "sgd", **columns: float) -> Tensor:
        """Return different values in every row and group, near the defaults of the rule's class; `columns` fixes
        some."""
        draw = torch.rand(
            self._num_rows, self.groups, NUM_HPARAMS, dtype=torch.float64, generator=self.generator("hparams")
        )
        hparams = torch.zeros(self._num_rows, self.groups, NUM_HPARAMS, dtype=torch.float64)
        for name, (low, high) in RANGES.items():
            hparams[..., COLUMNS[name]] = low + (high - low) * draw[..., COLUMNS[name]]
        for name in ("ADAPTIVE", "CLIP_INCLUDES_PROX", "DECOUPLED"):
            hparams[..., COLUMNS[name]] = (draw[..., COLUMNS[name]] > 0.5).double()
        for column, value in zip(
            range(FIRST_RULE_HPARAM, NUM_HPARAMS), rules.find(rule).rule_hparams(group_of(rule)), strict=False
        ):
            hparams[..., column] = float(value) * (0.9 + 0.1 * draw[..., column])
        if rule == "sgd":
            hparams[..., sgd.NESTEROV] = (draw[..., sgd.NESTEROV] > 0.5).double()
        if rule == "adam":
            hparams[..., adam.V_WEIGHT] = (draw[..., adam.V_WEIGHT] - 0.5).clamp(min=0.0)
        for name, value in columns.items():
            hparams[..., COLUMNS[name]] = value
        return self._rows(hparams)


# Ranges of the columns, and options of the rules that differ from the defaults of their classes.
RANGES = {
    "RHO": (-0.3, 0.3), "PERTURB_EPS": (1e-12, 1e-3), "ETA": (0.01, 0.1), "LR": (0.01, 0.2), "DECAY": (0.0, 0.1),
    "PROX_MU": (0.0, 0.5), "G2_COEF": (0.5, 1.0), "G1_COEF": (-0.5, 0.5), "CLIP": (0.5, 50.0), "PENALTY": (0.5, 2.0),
}  # fmt: skip
RULE_OPTIONS: dict[str, dict[str, Any]] = {"sgd": {"momentum": 0.9, "dampening": 0.5}, "adam": {"betas": (0.9, 0.99)}}
RULE_OPTIONS |= {"adagrad": {"lr_decay": 0.1}, "rmsprop": {"momentum": 0.9}}
# Columns by name, including the columns of rules that tests name.
COLUMNS = {column.name: int(column) for column in HParam}
COLUMNS |= {"MOMENTUM": sgd.MOMENTUM, "DAMPENING": sgd.DAMPENING, "NESTEROV": sgd.NESTEROV}
COLUMNS |= {"BETA1": adam.BETA1, "BETA2": adam.BETA2, "EPS": adam.EPS}


def group_of(rule: str, **options: Any) -> dict[str, Any]:
    """Return a parameter group of the class that the rule serves, with these options and the class's defaults."""
    params = [torch.nn.Parameter(torch.zeros(1))]
    optimizer = rules.find(rule).optimizer_types[0](params, **RULE_OPTIONS.get(rule, {}), **options)
    return optimizer.param_groups[0]


@st.composite
def cases(draw: st.DrawFn, dtypes: Sequence[torch.dtype] = DTYPES, max_rows: int = 3, long: bool = True) -> Case:
    lengths = draw(st.lists(st.sampled_from(LENGTHS), max_size=4))
    if long and draw(st.booleans()):
        lengths.insert(draw(st.integers(0, len(lengths))), draw(st.sampled_from(LONG)))
    groups = draw(st.integers(1, 2))
    is_aligned = draw(st.booleans())
    offset, records = 0, []
    for slot, length in enumerate(lengths):
        records.append([offset, length, draw(st.integers(0, groups - 1)), slot])
        offset = (
            offset + length + (-(offset + length)) % 16 if is_aligned else offset + length + draw(st.integers(0, 3))
        )
    segments = [r for r in records if draw(st.integers(0, 4))]  # a parameter without a gradient is left out
    table = torch.tensor(segments, dtype=torch.int64).reshape(-1, 4)
    dtype = draw(st.sampled_from(dtypes))
    return Case(
        rows=draw(st.integers(1, max_rows)),
        table=table,
        groups=groups,
        dtype=dtype,
        master=dtype in (torch.float16, torch.bfloat16) and draw(st.booleans()),
        scattered={name: draw(st.booleans()) for name in ("params", "grads", "weights", "g1")},
        shift=0 if is_aligned else draw(st.integers(0, 3)),
        gap=draw(st.sampled_from((0, 16) if is_aligned else (0, 1, 16))),
        seed=draw(st.integers(0, 1000)),
    )


@dataclass
class Buffer:
    """Memory with guard bands and NaN between values, and the mask of elements that an op may write."""

    name: str
    memory: Tensor
    writable: Tensor
    old_bits: Tensor = field(init=False)

    def snapshot(self) -> None:
        self.old_bits = bits(self.memory).clone()

    def check(self) -> None:
        changed = (bits(self.memory) != self.old_bits) & ~self.writable.to(self.memory.device)
        positions = changed.nonzero().flatten().tolist()
        assert not positions, f"{self.name}: wrote outside its segments, at elements {positions[:8]}"


class Memory:
    """The operands of one call on one device."""

    def __init__(self, case: Case, device: str) -> None:
        self.case, self.device = case, device
        self.buffers: list[Buffer] = []

    def _allocate(self, name: str, size: int, dtype: torch.dtype) -> Buffer:
        memory = torch.full((size + 2 * GUARD + self.case.shift,), torch.nan, dtype=dtype, device=self.device)
        buffer = Buffer(name, memory, torch.zeros(memory.shape, dtype=torch.bool))
        self.buffers.append(buffer)
        return buffer

    def field(self, name: str, values: Tensor, is_written: bool = False) -> Tensor:
        """Place the segments of `values` in a field."""
        case, stride = self.case, self.case.stride + self.case.gap
        buffer = self._allocate(name, case.rows * stride, values.dtype)
        view = (case.rows, case.stride), (stride, 1), GUARD + case.shift
        field = buffer.memory.as_strided(*view)
        mask = case.mask()
        field.copy_(torch.where(mask, values, torch.nan))
        if is_written:
            buffer.writable.as_strided(*view).copy_(mask)
        return field

    def share(self, name: str, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return a field whose rows are all the first row of `values` (row stride 0), and its canonical form."""
        first = values[:1].expand(self.case.rows, -1)
        field = self.field(name, first)
        return field[:1].expand(self.case.rows, -1), first

    def operand(self, name: str, values: Tensor, is_written: bool = False) -> list[Tensor]:
        """Place `values` as scattered tensors or as a field, as the case has it."""
        case = self.case
        if not case.scattered[name] or (not len(case.table) and case.seed % 2):
            return [self.field(name, values, is_written)]
        tensors = []
        for i, (offset, length, _, _) in enumerate(case.table.tolist()):
            stride = length + case.gap
            buffer = self._allocate(f"{name}[{i}]", case.rows * stride, values.dtype)
            view = (case.rows, length), (stride, 1), GUARD + case.shift
            tensor = buffer.memory.as_strided(*view)
            tensor.copy_(values[:, offset : offset + length])
            if is_written:
                buffer.writable.as_strided(*view).fill_(True)
            tensors.append(tensor)
        return tensors

    def snapshot(self) -> None:
        """Store the memory, to check later that only writable elements have changed."""
        for buffer in self.buffers:
            buffer.snapshot()

    def check(self) -> None:
        for buffer in self.buffers:
            buffer.check()

    def read(self, operand: Sequence[Tensor] | Tensor) -> Tensor:
        """Return the canonical form of an operand or a field, on the CPU, with NaN outside the segments."""
        case = self.case
        if isinstance(operand, Tensor):
            operand = [operand]
        out = torch.full((case.rows, case.stride), torch.nan, dtype=operand[0].dtype if operand else case.dtype)
        views = reference.segments(operand, case.table, case.rows)
        for (offset, length, _, _), view in zip(case.table.tolist(), views, strict=True):
            out[:, offset : offset + length] = view.cpu()
        return out


def bits(tensor: Tensor) -> Tensor:
    """Return the elements as integers, so that NaN equals itself and the zeros differ."""
    return tensor.view({8: torch.int64, 4: torch.int32, 2: torch.int16}[tensor.element_size()])


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(bits(a), bits(b))


def close(actual: Tensor, expected: Tensor, dtype: torch.dtype | None = None) -> None:
    """Compare with the tolerance of `dtype`, by default the dtype of `actual`."""
    rtol, atol = TOLERANCE[dtype or actual.dtype]
    torch.testing.assert_close(actual.double().cpu(), expected.double(), rtol=rtol, atol=atol, equal_nan=True)


def resync(backup: Tensor, params: Tensor) -> Tensor:
    """Return the weights from which a saving perturbation starts, in float64."""
    return torch.where(backup.to(params.dtype) == params, backup.double(), params.double())


def nan(case: Case, dtype: torch.dtype) -> Tensor:
    return torch.full((case.rows, case.stride), torch.nan, dtype=dtype)
