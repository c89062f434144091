"""The CUDA kernels, run on the CPU by an emulation (see `emulated.py`): every test of the ops, and tests of the
kernels.

test_cuda_seeded.py shows that tests like these fail if a kernel has an error.
"""

import inspect
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from hypothesis import given

from fastsam_kernels import native, rules
from fastsam_kernels.hparams import NUM_HPARAMS, HParam
from tests.helpers import emulated
from tests.helpers.emulated import Emulation
from tests.helpers.emulated_steps import SMALL, assert_sound, case_of, sam_step
from tests.helpers.op_cases import Case, Memory, cases, explore, same_bits
from tests.ops import test_bits as test_ops_bits
from tests.ops import test_fed as test_ops_fed
from tests.ops import test_parity as test_ops_parity

pytestmark = [
    pytest.mark.gpu_code,
    pytest.mark.skipif(emulated.why_not() is not None, reason=str(emulated.why_not())),
]


@pytest.fixture(scope="module")
def small_emulation(folder: Path) -> Emulation:
    return emulated.load_library(folder / "small", SMALL, "fastsam_emulated_small")


def calls(module: ModuleType) -> Iterator:
    """Yield the tests of a module that take a backend, each with every value of its other parameters."""
    for name, function in inspect.getmembers(module, inspect.isfunction):
        marks = [mark for mark in getattr(function, "pytestmark", ()) if mark.name == "parametrize"]
        if not name.startswith("test_") or "backend" not in [mark.args[0] for mark in marks]:
            continue
        other_marks = [mark for mark in marks if mark.args[0] != "backend"]
        for values in itertools.product(*(mark.args[1] for mark in other_marks)):
            options = dict(zip((mark.args[0] for mark in other_marks), values, strict=True))
            yield pytest.param(function, options, id="-".join([name, *map(str, values)]))


OPS = [*calls(test_ops_parity), *calls(test_ops_fed), *calls(test_ops_bits)]


def test_there_are_tests_to_run() -> None:
    names = {param.values[0].__name__ for param in OPS}
    ops = [name.removesuffix("_") for name in native._OPS]
    assert len(OPS) > 15 and all(any(op in name for name in names) for op in ops)


@pytest.mark.parametrize(("test", "options"), OPS)
def test_ops(emulation: Emulation, test: Callable[..., None], options: dict[str, object]) -> None:
    emulation.order(0, 0)
    test(emulation.backend, **options)
    assert_sound(emulation)


@pytest.mark.parametrize(("test", "options"), OPS)
def test_ops_in_several_launches(small_emulation: Emulation, test: Callable[..., None], options: dict) -> None:
    small_emulation.order(7, 1)
    test(small_emulation.backend, **options)
    assert_sound(small_emulation)


@pytest.mark.parametrize(
    ("segments", "launches", "num_bytes"),
    [(1, 4, 4096), (62, 4, 4096), (65, 4, 32764), (500, 4, 32764), (600, 7, 32764)],
)
def test_launches_per_step(emulation: Emulation, segments: int, launches: int, num_bytes: int) -> None:
    """Norm, perturb, restore and update take one launch each while the tensors fit the argument of a kernel."""
    emulation.order(0, 0)
    case = case_of([1 + i % 40 for i in range(segments)], rows=2)
    old_count = emulation.count("launches")
    sam_step(emulation.backend.load(), case)
    assert emulation.count("launches") - old_count == launches
    assert emulation.count("largest_argument") <= num_bytes


SMALL_CLIENT = [128, 33, 64, 4096, 5, 32, 32, 2000, 64, 64, 17, 128, 10_000, 48, 48, 129, 10, 1, 96, 96]  # 4 large ones


def test_small_segments_share_blocks(emulation: Emulation) -> None:
    """16 of 20 segments have at most 128 elements: their 16 blocks a row are 2; the large ones keep their own."""
    emulation.order(0, 0)
    case = case_of(SMALL_CLIENT, rows=3)
    kernels, sums = emulation.backend.load(), case.sums()
    old_count = emulation.count("blocks")
    kernels.norm_(sums, [case.values("grads")], [], case.table, case.hparams(ADAPTIVE=0.0))
    assert emulation.count("blocks") - old_count == 3 * (1 + 1 + 3 + 1 + 2)


@pytest.mark.parametrize("order", [0, 1, 7])
def test_sums_do_not_see_who_shares_a_block(emulation: Emulation, order: int) -> None:
    """Segments that share blocks have the bits of the same segments with padding, which fill separate blocks."""
    emulation.order(order, order % 2)
    kernels, sums = emulation.backend.load(), []
    shared_case = case_of([-(-length // 4) * 4 for length in SMALL_CLIENT], rows=2)
    padded_case = case_of([max(length, 132) for length in shared_case.table[:, 1].tolist()], rows=2)
    operands = [shared_case.values(name) for name in ("grads", "weights", "s")]
    for case in (shared_case, padded_case):
        x, y, s = (torch.zeros(2, case.stride) for _ in range(3))
        for (source, length, *_), (target, *_) in zip(shared_case.table.tolist(), case.table.tolist(), strict=True):
            for field, values in zip((x, y, s), operands, strict=True):
                field[:, target : target + length] = values[:, source : source + length]
        hparams, pairs = case.hparams(), torch.empty(2, 2).double()
        norms = torch.full((3, 2), torch.nan, dtype=torch.float64)
        kernels.norm_(norms[0], [x], [y], case.table, hparams)
        kernels.dual_norm_(norms[1], [x], y, s, case.table, hparams)
        kernels.update_norm_(norms[2], [y], y, [x], case.table, hparams, [s], s)
        kernels.inner_(pairs, [x], [y], case.table)
        sums.append(torch.cat([norms.flatten(), pairs.flatten()]))
    assert same_bits(*sums)


def test_every_step_is_counted_once_in_several_launches(emulation: Emulation) -> None:
    case = case_of([3, 0, 5] * 200, rows=2)
    hparams = case.hparams("adam")
    steps = torch.zeros(2, 600)
    fields = [case.values(name).abs() for name in ("params", "exp_avg", "exp_avg_sq")]
    for t in (1, 2):
        operands = [fields[0]], None, [case.values("grads")], case.table, hparams
        emulation.backend.load().update_(*operands, "adam", fields[1:], steps=steps)
        assert (steps == t).all()


def test_a_row_without_elements_is_finished(emulation: Emulation) -> None:
    """No block has work, and still the sum must be written and the step counted."""
    kernels, hparams = emulation.backend.load(), torch.zeros(2, 1, NUM_HPARAMS, dtype=torch.float64)
    table, empty = torch.tensor([[0, 0, 0, 0]]), [torch.zeros(2, 0)]
    sumsq, steps = torch.full((2,), torch.nan, dtype=torch.float64), torch.zeros(2, 1)
    kernels.norm_(sumsq, empty, [], table, hparams)
    assert (sumsq == 0).all()
    field = torch.zeros(2, 16)
    kernels.update_(empty, None, empty, table, hparams, "adam", [field, field.clone()], steps=steps)
    assert (steps == 1).all()


def test_a_missing_weight_list_is_not_ignored(emulation: Emulation) -> None:
    """An adaptive group needs the weights; the device cannot raise, so the norm is NaN, with which nothing is
    perturbed."""
    hparams = torch.zeros(1, 1, NUM_HPARAMS, dtype=torch.float64)
    hparams[..., HParam.ADAPTIVE] = 1.0
    sumsq = torch.zeros(1, dtype=torch.float64)
    emulation.backend.load().norm_(sumsq, [torch.ones(5)], [], torch.tensor([[0, 5, 0, 0]]), hparams)
    assert sumsq.isnan().all()


@pytest.mark.skipif(native.why_not("cpu") is not None, reason=f"no compiled kernels: {native.why_not('cpu')}")
def test_the_same_bits_as_the_cpu_kernels(emulation: Emulation) -> None:
    """Both take their arithmetic from csrc/kernel_math.h and csrc/rules, and neither contracts a multiplication and an
    addition."""

    @explore(emulation.backend)
    @given(cases())
    def holds(case: Case) -> None:
        outputs = []
        for kernels in (native, emulation.backend.load()):
            memory = Memory(case, "cpu")
            params, grads = (
                memory.operand("params", case.values("params"), is_written=True),
                memory.operand("grads", case.values("grads")),
            )
            names = ("q", "first", "second", "third")
            *fields, third = (memory.field(n, case.values(n, case.compute).abs() + 1, True) for n in names)
            backup = memory.field("backup", case.values("params").to(case.backup_dtype), is_written=True)
            steps = torch.ones(case.rows, int(case.table[:, 3].max()) + 1 if len(case.table) else 1)
            writes = [params, backup, *fields, third]
            kernels.perturb_(params, backup, grads, case.table, case.hparams(), case.sums(), True)
            outputs.append([memory.read(operand) for operand in writes])
            general = {"q": fields[0], "shift": backup.to(case.compute), "sumsq_v": case.sums(), "write_master": True}
            for name, rule in rules.RULES.items():
                state = [*fields[1:], third][: len(rule.state)]
                counts = {"steps": steps} if rule.counter else {}
                for options in (general, {"write_master": True}):
                    operands = params, backup, grads, case.table, case.hparams(name)
                    kernels.update_(*operands, name, state, **options, **counts)
                    outputs[-1] += [memory.read(operand) for operand in writes]
            h = case.hparams()
            kernels.dual_perturb_(params, backup, fields[1], grads, fields[0], case.table, h, case.sums(), fields[2])
            outputs[-1] += [memory.read(operand) for operand in writes]
        assert all(same_bits(a, b) for a, b in zip(*outputs, strict=True))

    holds()
