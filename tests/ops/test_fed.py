"""The ops of federated algorithms, as in test_ops_parity.py: perturbation with a dual, inner products,
order-independent sums."""

from dataclasses import replace
from fractions import Fraction
from math import inf, isfinite, trunc
from math import nan as not_a_number

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from fastsam.backends import Backend, Kernels
from fastsam_kernels import reference
from fastsam_kernels.constants import HIGH_BITS, LIMIT, LOW_BITS
from tests.helpers.op_cases import BACKENDS, Case, Memory, cases, close, nan, property_test, same_bits


@property_test(cases(), st.booleans(), st.booleans())
def test_dual_norm(backend: Backend, case: Case, is_shared: bool, accumulate: bool) -> None:
    hparams, grads, memory = case.hparams(), case.values("grads"), Memory(case, backend.device)
    mu, s = case.values("mu", case.compute), case.values("s", case.compute)
    placed_mu = memory.field("mu", mu)
    placed_s, s = memory.share("s", s) if is_shared else (memory.field("s", s), s)
    start = case.sums() if accumulate else torch.full((case.rows,), torch.nan, dtype=torch.float64)
    expected, sumsq = start.clone(), start.to(backend.device)
    reference.dual_norm_(expected, [grads.double()], mu.double(), s.double(), case.table, hparams, accumulate)
    placed_grads = memory.operand("grads", grads)
    memory.snapshot()
    backend.load().dual_norm_(
        sumsq, placed_grads, placed_mu, placed_s, case.table, hparams.to(backend.device), accumulate
    )
    memory.check()
    close(sumsq, expected, case.compute)


@property_test(cases(), st.booleans(), st.booleans(), st.sampled_from((None, 0.0, torch.inf)), examples=60)
def test_dual_perturb(backend: Backend, case: Case, is_shared: bool, with_eps: bool, norm: float | None) -> None:
    hparams, sumsq, grads, memory = case.hparams(), case.sums(), case.values("grads"), Memory(case, backend.device)
    if norm is not None:
        sumsq[0] = norm
    mu, s = case.values("mu", case.compute), case.values("s", case.compute)
    backup = case.values("backup", torch.float64).to(case.backup_dtype)
    placed_s, s = memory.share("s", s) if is_shared else (memory.field("s", s), s)
    placed_backup, backup = memory.share("backup", backup) if is_shared else (memory.field("backup", backup), backup)
    params64, eps64 = (torch.zeros(backup.shape, dtype=torch.float64) for _ in range(2))
    mu64 = mu.to(torch.float64, copy=True)
    args64 = [grads.double()], s.double(), case.table, hparams, sumsq
    reference.dual_perturb_([params64], backup.double(), mu64, *args64, eps64 if with_eps else None)

    placed_params = memory.operand("params", nan(case, case.dtype), is_written=True)
    placed_mu, placed_grads = memory.field("mu", mu, is_written=True), memory.operand("grads", grads)
    placed_eps = memory.field("eps", nan(case, case.compute), is_written=True) if with_eps else None
    memory.snapshot()
    args = placed_grads, placed_s, case.table, hparams.to(backend.device), sumsq.to(backend.device)
    backend.load().dual_perturb_(placed_params, placed_backup, placed_mu, *args, eps=placed_eps)
    memory.check()
    mask = case.mask()
    close(memory.read(placed_params)[mask], params64[mask])
    close(memory.read(placed_mu)[mask], mu64[mask])
    if placed_eps is not None:
        close(memory.read(placed_eps)[mask], eps64[mask])


@property_test(cases(max_rows=1), st.permutations((0.0, inf, not_a_number, 4.0)), examples=20)
def test_rows_without_a_usable_norm_take_no_dual_step(backend: Backend, case: Case, norms: list[float]) -> None:
    """A zero, infinite or NaN norm: `z = w` bit for bit, minus zero included, and `eps = 0`, whatever the gradients
    hold."""
    case = replace(case, rows=4)
    memory, w, grads = Memory(case, backend.device), case.values("params"), case.values("grads")
    w[:, ::7], grads[:, ::3] = -0.0, inf
    placed_params = memory.operand("params", nan(case, case.dtype), is_written=True)
    placed_backup, placed_grads = memory.field("backup", w.to(case.backup_dtype)), memory.operand("grads", grads)
    placed_mu = memory.field("mu", case.values("mu", case.compute), is_written=True)
    placed_s = memory.field("s", case.values("s", case.compute))
    placed_eps = memory.field("eps", nan(case, case.compute), is_written=True)
    memory.snapshot()
    args = (
        case.table,
        case.hparams().to(backend.device),
        torch.tensor(norms, dtype=torch.float64).to(backend.device),
    )
    backend.load().dual_perturb_(placed_params, placed_backup, placed_mu, placed_grads, placed_s, *args, eps=placed_eps)
    memory.check()
    new_weights, eps, mu, mask = (
        memory.read(placed_params),
        memory.read(placed_eps),
        memory.read(placed_mu),
        case.mask(),
    )
    for row in (r for r, norm in enumerate(norms) if norm != 4.0):
        assert same_bits(new_weights[row][mask[row]], w[row][mask[row]])
        assert not eps[row][mask[row]].any() and mu[row][mask[row]].isfinite().all()


@property_test(cases(), st.booleans(), st.booleans())
def test_inner(backend: Backend, case: Case, is_shared: bool, accumulate: bool) -> None:
    memory = Memory(case, backend.device)
    x, y = case.values("grads"), case.values("weights")
    if is_shared:
        field, y = memory.share("weights", y)
        placed_y = [field]
    else:
        placed_y = memory.operand("weights", y)
    placed_x = memory.operand("grads", x)
    start = torch.stack([case.sums(), case.sums() + 1], 1) if accumulate else nan(case, torch.float64)[:, :1]
    expected = start.expand(case.rows, 2).clone()
    out = expected.to(backend.device, copy=True)
    reference.inner_(expected, [x.double()], [y.double()], case.table, accumulate)
    memory.snapshot()
    backend.load().inner_(out, placed_x, placed_y, case.table, accumulate)
    memory.check()
    close(out, expected, torch.float64)  # the products of narrower numbers are exact


TINY, ODD = 2.0**-1074, 1.0 + 2.0**-52
SPECIAL = (
    0.0, -0.0, inf, -inf, not_a_number, TINY, -TINY, 2.0**-149, 2.0**-80, 1.5 * 2.0**-80, 0.75 * 2.0**-80, 2.0**-28,
    LIMIT, LIMIT * ODD, 1e300, ODD,
)  # fmt: skip
NUMBERS = st.one_of(
    st.sampled_from([sign * x for x in SPECIAL for sign in (1, -1)]),
    st.floats(width=64),
    st.builds(lambda m, e: m * 2.0**e, st.floats(-2, 2), st.integers(-90, 36)),
)
FACTORS = st.sampled_from((1.0, 0.1, 0.75, -0.3, 2.0**-9, 0.0, 1e-300, 1e300, TINY))


def close_rows(kernels: Kernels, sums: tuple[Tensor, Tensor], x: Tensor, factor: float, base: Tensor | None) -> Tensor:
    """`accumulate_` of `x`; the largest number of each row."""
    largest = torch.full((x.shape[0] if x.dim() == 2 else 1,), -7.0, dtype=torch.float64, device=x.device)
    kernels.accumulate_(*sums, x, factor, base=base, largest_=largest)
    return largest


def numbers(sums: tuple[Tensor, Tensor]) -> list[int]:
    """The sums in units of 2^-80."""
    return [h * 2**LOW_BITS + v for h, v in zip(*(limb.tolist() for limb in sums), strict=True)]


@property_test(
    st.data(),
    st.sampled_from((torch.float32, torch.float64)),
    st.booleans(),
    st.integers(0, 9),
    st.integers(0, 3),
    examples=80,
)
def test_accumulate_rows(
    backend: Backend, data: st.DataObject, dtype: torch.dtype, has_base: bool, rows: int, gap: int
) -> None:
    """Any rows of any numbers: Python's integers, the largest element, and taking out again leaves nothing, to the last
    bit."""
    n = data.draw(st.sampled_from((0, 1, 3, 8, 33)))
    numbers_drawn = data.draw(st.lists(NUMBERS, min_size=1, max_size=24))
    factor, shift = data.draw(FACTORS), data.draw(st.integers(0, 23))
    values = [numbers_drawn[(i * 7 + shift) % len(numbers_drawn)] for i in range((rows + 1) * (n + gap))]
    field = torch.tensor(values, dtype=torch.float64).to(dtype).reshape(rows + 1, n + gap).to(backend.device)
    x, base = field[:rows, :n], field[rows, :n].contiguous() if has_base else None
    start = torch.arange(2 * n, device=backend.device).reshape(2, n) * 12345
    sums = start[0].clone(), start[1].clone()
    largest = close_rows(backend.load(), sums, x, factor, base)

    d = (x - base if has_base else x).double().tolist()
    limit = LIMIT * 2**HIGH_BITS
    units = [[v * (factor * 2.0**HIGH_BITS) for v in row] for row in d]
    fixed_rows = [[trunc(Fraction(v) * 2**LOW_BITS) if abs(v) <= limit else 0 for v in row] for row in units]
    expected = [a + sum(row[i] for row in fixed_rows) for i, a in enumerate(numbers((start[0], start[1])))]
    wraps = 2 ** (64 + LOW_BITS)
    assert [(a - b) % wraps for a, b in zip(numbers(sums), expected, strict=True)] == [0] * n
    assert all(0 <= v < 2**LOW_BITS for v in sums[1].tolist())
    result = [max(map(abs, row), default=0.0) if all(map(isfinite, row)) else None for row in d]
    assert [None if v != v else v for v in largest.tolist()] == result

    for row in x.unbind()[::-1]:  # row by row in reverse order
        close_rows(backend.load(), sums, row, -factor, base)
    assert torch.equal(sums[0], start[0]) and torch.equal(sums[1], start[1])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_many_rows_are_the_single_calls(backend: Backend, dtype: torch.dtype) -> None:
    """More rows than low limbs of all ones would fit, several blocks and threads, with the bits of one call after the
    other."""
    device, rows, n = backend.device, 2100, 5
    ones = torch.full((rows, n), -(1 - 2.0**-24) * 2.0**-29, dtype=dtype, device=device)
    sums_of_calls = torch.zeros(2, n, dtype=torch.int64, device=device).unbind()
    if (backend.name, device) != ("triton", "cpu"):
        close_rows(backend.load(), sums_of_calls, ones, 1.0, None)
        assert numbers(sums_of_calls) == [rows * trunc(Fraction(ones[0, 0].item()) * 2**80)] * n
    rows, n = 6, 20_001
    x, base = torch.randn(rows + 1, n, dtype=dtype, device=device).split([rows, 1])
    x[3, n - 1], x[5, 0] = -77.0, torch.inf
    high, single = (torch.zeros(2, n, dtype=torch.int64, device=device).unbind() for _ in range(2))
    largest = close_rows(backend.load(), high, x, 0.3, base[0])
    for row, size in zip(x, largest, strict=True):
        d = row - base[0]
        close_rows(backend.load(), single, d, 0.3, None)
        assert size == d.double().abs().max() or (size.isnan() and not d.isfinite().all())
    assert largest.isnan().tolist() == [False] * 5 + [True]
    assert numbers(high) == numbers(single)
