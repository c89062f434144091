"""The kernels of bench/variants, run on the CPU by the emulation: the same bits as the emulated kernels of the library,
and within the tolerance of the reference; and their benchmark. That `fixed_pairs` fails when an error is put into the
kernel: test_variants_seeded.py."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from torch import Tensor

from bench.clocks import Machine
from bench.kernel_cases import KernelSize
from bench.variants import report
from bench.variants.__main__ import Race, main
from bench.variants.cases import CASES, VariantCase
from bench.variants.library import Dependent, NotServed, OneRead, Variant
from fastsam_kernels import reference
from tests.helpers import emulated
from tests.helpers.emulated import Emulation
from tests.helpers.emulated_steps import SMALL, case_of
from tests.helpers.op_cases import Case, Memory, cases, close, explore, same_bits

pytestmark = [
    pytest.mark.gpu_code,
    pytest.mark.skipif(emulated.why_not() is not None, reason=str(emulated.why_not())),
]


@pytest.fixture(scope="module")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """That of test_cuda_emulated.py."""
    cache = getattr(request.config, "cache", None)
    return Path(cache.mkdir("cuda-emulation")) if cache else tmp_path_factory.mktemp("cuda-emulation")


@dataclass
class Built:
    """An emulation of the library, and of the variants beside it."""

    emulation: Emulation
    variants: Path
    most_segments: int  # of a launch of two list operands

    @property
    def today(self) -> ModuleType:
        return self.emulation.backend.load()


@pytest.fixture(scope="module", params=["as-it-is", "small"])
def built(request: pytest.FixtureRequest, folder: Path) -> Built:
    """The kernels as they are, and with what only large models meet: chunks of several sweeps, calls of several
    launches."""
    small = request.param == "small"
    changes = SMALL if small else emulated.NONE
    emulation = emulated.loaded(
        folder / request.param, changes, "fastsam_emulated_small" if small else emulated.NAMESPACE
    )
    shared = {name: texts for name, texts in changes.items() if not name.endswith(".cu")}
    variants = emulated.compile_variants(folder / f"variants-{request.param}", csrc_changes=shared)
    return Built(emulation, variants, 2 if small else 524)


def assert_sound(variant: Variant) -> None:
    assert emulated.count(variant.loaded, "misaligned") == 0, "a pack was accessed where it is not aligned"
    assert emulated.count(variant.loaded, "out_of_bounds") == 0, "a table or a pack was indexed beyond its end"


# --- norm and perturbation in one read ---


def pair(kernels: ModuleType | Variant, case: Case, adaptive: float | None) -> tuple[Tensor, Tensor]:
    """The sums of squares and the perturbed weights of a case; guard bands around all operands."""
    hyper, memory = case.hyper() if adaptive is None else case.hyper(ADAPTIVE=adaptive), Memory(case, "cpu")
    z = memory.operand("z", case.values("z"), written=True)
    grads = memory.operand("grads", case.values("grads"))
    origin = memory.field("origin", case.values("origin"))
    sumsq = torch.full((case.rows,), torch.nan, dtype=torch.float64)
    memory.snapshot()
    if isinstance(kernels, Variant):
        kernels.norm_perturb_(z, origin, grads, case.table, hyper, sumsq)
    else:
        kernels.norm_(sumsq, grads, [], case.table, hyper)
        kernels.perturb_(z, origin, grads, case.table, hyper, sumsq, False)
    memory.check()
    return sumsq, memory.read(z)


def agrees(variant: Variant, case: Case) -> None:
    """With the reference in float64, where no group is adaptive."""
    sumsq, z = pair(variant, case, 0.0)
    hyper, z64, sumsq64 = case.hyper(ADAPTIVE=0.0), case.values("z").double(), torch.zeros_like(sumsq)
    grads = [case.values("grads").double()]
    reference.norm_(sumsq64, grads, [], case.table, hyper)
    reference.perturb_([z64], case.values("origin").double(), grads, case.table, hyper, sumsq64, False)
    close(sumsq, sumsq64, case.compute)
    close(z[case.mask()], z64[case.mask()])


def test_one_read_has_the_bits_of_norm_and_perturb(built: Built) -> None:
    one_read = OneRead(built.variants)

    @explore(built.emulation.backend)
    @given(cases(dtypes=(torch.float32,)))
    def holds(case: Case) -> None:
        if bool((case.table[:, 0] % 4).any()) or len(case.table) > built.most_segments:
            with pytest.raises(NotServed):
                pair(one_read, case, None)
            return
        emulated.order(one_read.loaded, case.seed % 2, case.seed % 3)
        for adaptive in (
            0.0,
            None,
        ):
            # None: a group here and there is, so the norm is NaN and the row stays where it is
            ours, theirs = pair(one_read, case, adaptive), pair(built.today, case, adaptive)
            assert all(map(same_bits, ours, theirs))
        agrees(one_read, case)

    holds()
    assert_sound(one_read)


def test_dependent_has_the_bits_of_norm_and_perturb(built: Built) -> None:
    dependent = Dependent(built.variants)

    @explore(built.emulation.backend)
    @given(cases(dtypes=(torch.float32,)))
    def holds(case: Case) -> None:
        emulated.order(dependent.loaded, case.seed % 2, case.seed % 3)
        for _ in range(2):  # with the tickets that the first call left
            assert all(map(same_bits, pair(dependent, case, 0.0), pair(built.today, case, 0.0)))
        agrees(dependent, case)

    holds()
    assert_sound(dependent)


LAYOUTS = ([33, 0, 4096, 5, 4097, 0], [8193, 1], [2047], [1], [1 + 977 * i % 503 for i in range(60)])


def fixed_pairs(one_read: OneRead, today: ModuleType | None = None) -> None:
    """A few cases whose layouts meet every branch of the indexing: empty, odd and unaligned segments, one row and
    several."""
    for shift, rows, order in ((0, 1, 0), (0, 3, 1), (1, 2, 2)):
        emulated.order(one_read.loaded, 1 - order % 2, order)
        for lengths in LAYOUTS:
            case = case_of(lengths, rows, shift)
            agrees(one_read, case)
            if today is not None:
                assert all(map(same_bits, pair(one_read, case, 0.0), pair(today, case, 0.0)))
    assert_sound(one_read)


def test_one_read_at_the_edges(folder: Path, built: Built) -> None:
    if built.most_segments > 60:
        fixed_pairs(OneRead(built.variants), built.today)


def test_one_read_is_one_launch_of_a_block_per_row(built: Built) -> None:
    one_read, case = OneRead(built.variants), case_of([1000, 9], rows=5)
    before = [emulated.count(one_read.loaded, name) for name in ("launches", "blocks")]
    pair(one_read, case, 0.0)
    assert [emulated.count(one_read.loaded, name) for name in ("launches", "blocks")] == [before[0] + 1, before[1] + 5]


@pytest.mark.parametrize(
    "lengths", [[58_112], [57_000, 50], [7] * 600], ids=["nothing left for sums", "the paddings too", "segments"]
)
def test_one_read_says_what_does_not_fit(built: Built, lengths: list[int]) -> None:
    """227 KB of shared memory hold 58,112 elements, and something beside them is needed."""
    one_read = OneRead(built.variants)
    case = case_of(lengths, rows=1)
    served = lengths == [57_000, 50] and built.most_segments > 1
    if served:
        agrees(one_read, case)
        return
    with pytest.raises(NotServed, match="does not fit"):
        pair(one_read, case, 0.0)


def test_one_read_takes_only_float32(built: Built) -> None:
    with pytest.raises(NotServed, match="float32"):
        pair(OneRead(built.variants), case_of([5], rows=1, dtype=torch.float64), 0.0)


# --- the benchmark ---


def small_cases() -> list[VariantCase]:
    """On two rows of two tensors."""
    small = KernelSize("two", "two rows", ((32, 8), (10,)), rows=2)
    return [replace(case, kernels=replace(case.kernels, size=small)) for case in (CASES[0], CASES[-1])]


def test_the_benchmark(
    built: Built, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As on a GPU, but for the clock and the graph: every figure beside its prediction."""
    cpu, cases = Machine(torch.device("cpu")), small_cases()
    properties = SimpleNamespace(multi_processor_count=132)
    here = replace(built.emulation.backend, name="native", device="cuda")
    for name, stand_in in (
        ("torch.cuda.is_available", lambda: True),
        ("torch.cuda.set_device", lambda device: None),
        ("torch.cuda.get_device_capability", lambda device: (9, 0)),
        ("torch.cuda.get_device_properties", lambda device: properties),
        ("bench.kernel_data.MAX_SETS", 2),
        ("bench.variants.__main__.Machine", lambda device: cpu),
        ("bench.variants.__main__.CASES", cases),
        ("bench.variants.__main__.ROUNDS", 1),
        ("bench.variants.__main__.backends.table", lambda: [here]),
        ("bench.variants.library.build", lambda arch: built.variants if arch == "90" else None),
        ("bench.environment.facts", lambda command: {"command": command}),
    ):
        monkeypatch.setattr(name, stand_in)
    assert main(["--device", "cuda", "--out", str(tmp_path)]) == 0
    results = json.loads((tmp_path / report.FILE).read_text())["cases"]
    assert [r["group"] for r in results] == ["one read", "dependent"]
    assert all(r["gate"] == "green" and r["ratio"]["median"] > 0 and r["predicted"] > 0 for r in results), results
    printed = capsys.readouterr().out
    assert printed.count("| two rows |") == 2 and printed.splitlines()[-1].startswith("one read: ")
    assert main(["--out", str(tmp_path / "none"), "--seconds", "0"]) == 0
    assert capsys.readouterr().out.count("no time left for") == 2


def test_no_figure_for_a_variant_with_other_bits(built: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.kernel_data.MAX_SETS", 2)
    machine, case = Machine(torch.device("cpu")), small_cases()[0]

    class Other:
        def __getattr__(self, op: str) -> Any:
            return getattr(built.today, op)

        def norm_(self, sumsq: Tensor, *others: Any) -> None:
            built.today.norm_(sumsq, *others)
            sumsq.mul_(1 + 2**-50)

    wrong = Race(case, machine, Other(), OneRead(built.variants)).run(1, 132)
    assert wrong["gate"] == "red" and "other bits than today's kernels in sumsq" in wrong["reason"]
    assert wrong["ratio"] is None and report.verdict(case.group, [wrong]) == "drop: it was wrong"
