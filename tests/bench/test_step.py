"""The benchmark harness: it must not show a time for a wrong result, nor count what it says it does not count."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bench import gate, memory, report, step
from bench.cases import cases, choose
from bench.contenders import Contender, FlatStepper, ForeachStepper, OptimizerStepper, contenders
from bench.copied_sam import CopiedSAM
from bench.problem import LR, MOMENTUM, RHO, SIZES, WEIGHT_DECAY, Gradients, Size, initial_weights
from bench.timing import Clock, Drive, Summary, measure
from tests.helpers.places import ROOT

TINY = Size("tiny", "tiny", ((40, 25), (40,), (), (3, 0)), steps=2, rounds=3)


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    with step.intra_op_threads(1):
        yield


def problem(size: Size = TINY) -> tuple[list[Tensor], Gradients]:
    return initial_weights(size.shapes), Gradients(size.shapes)


# ---- the registry
# ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "tensors", "parameters"),
    [("resnet18", 62, 11_689_512), ("small_cnn", 20, 51_994), ("list30m", 200, 30_000_000)],
)
def test_sizes(name: str, tensors: int, parameters: int) -> None:
    assert len(SIZES[name].shapes) == tensors
    assert SIZES[name].parameters == parameters


def test_every_size_meets_every_contender_once() -> None:
    names = [case.name for case in cases()]
    assert len(set(names)) == len(names) == len(SIZES) * len(contenders())
    assert {"fastsam_native", "fastsam_foreach", "copied", "flat", "foreach", "compiled", "pytorch_optimizer"} <= set(
        contenders()
    )


def test_an_unknown_name_is_met_with_the_nearest() -> None:
    with pytest.raises(ValueError, match="did you mean 'small_cnn'"):
        choose(SIZES, ["smal_cnn"], "size")


def test_gradients_move_and_change_from_pass_to_pass() -> None:
    gradients = Gradients(TINY.shapes)
    for i in range(6):
        now, then = gradients.tensors(i), gradients.tensors(i + 1)
        assert not torch.equal(now[0], then[0])
        assert now[0].data_ptr() != then[0].data_ptr()
        assert torch.equal(gradients.flat(i), torch.cat([g.flatten() for g in now]))
    # and those of the first pass of a step from those of the first pass of the next
    assert gradients.tensors(0)[0].data_ptr() != gradients.tensors(2)[0].data_ptr()


# ---- the gate
# ----------------------------------------------------------------------------------------------------------


@pytest.mark.of_each_kind
@pytest.mark.parametrize("contender", [c for c in contenders().values() if not c.compiles], ids=lambda c: c.name)
@pytest.mark.parametrize("size", [TINY, SIZES["small_cnn"]], ids=lambda s: s.name)
def test_contenders_agree_with_the_reference(contender: Contender, size: Size) -> None:
    reason = contender.why_not()
    if reason is not None:
        pytest.skip(reason)
    green, red = gate.check([contender], *problem(size))
    assert red == {} and list(green) == [contender.name]


@pytest.mark.slow
def test_the_compiled_contender_agrees_with_the_reference() -> None:
    contender = contenders()["compiled"]
    reason = contender.why_not()
    if reason is not None:
        pytest.skip(reason)
    assert gate.check([contender], *problem(SIZES["small_cnn"]))[1] == {}


class NotRestored(ForeachStepper):
    """Steps from the perturbed weights."""

    def _second(self) -> None:
        self.sgd.step()


class Poisoned(FlatStepper):
    """One weight becomes NaN."""

    def second(self) -> None:
        super().second()
        self.data[7] = float("nan")


class Raising(FlatStepper):
    def second(self) -> None:
        raise RuntimeError("this one does not work here")


def _sam(**changed: float) -> Callable[[Sequence[Tensor]], OptimizerStepper]:
    options = {"rho": RHO, "lr": LR, "momentum": MOMENTUM, "weight_decay": WEIGHT_DECAY, **changed}
    return lambda weights: OptimizerStepper(weights, lambda p: CopiedSAM(p, torch.optim.SGD, **options))


WRONG = {
    "rho off by a thousandth": (_sam(rho=RHO * 1.001), "perturbation of step 1: tensor 0 has "),
    "momentum off by a thousandth": (_sam(momentum=MOMENTUM * 0.999), "weights after step 2: tensor 0 has "),
    "no weight decay": (_sam(weight_decay=0.0), "weights after step 1: tensor 0 has "),
    "not restored": (NotRestored, "weights after step 1: tensor 0 has "),
    "NaN": (Poisoned, "weights after step 1: tensor 0 has nan where "),
    "raising": (Raising, "raised RuntimeError: this one does not work here"),
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.of_each_kind) if n == "rho off by a thousandth" else n for n in WRONG],
)
def test_a_wrong_contender_gets_a_reason_and_no_time(name: str) -> None:
    build, message = WRONG[name]
    wrong, right = Contender("wrong", "wrong", build), contenders()["flat"]
    bench = step.Bench(TINY, [wrong, right])
    result = bench.run(1, step.progress_bar(None))
    first, second = result["contenders"]
    assert first["gate"] == "red" and message in first["reason"]
    assert "seconds" not in first and "to_flat" not in first
    assert second["gate"] == "green" and second["to_flat"]["median"] == 1.0
    assert "wrong" in str(report.markdown(record_of(result)))


# ---- what is counted
# ---------------------------------------------------------------------------------------------------


class Sleepy:
    """Handing over gradients takes 20 ms, a phase takes 2 ms."""

    def take(self, gradients: Gradients, index: int) -> None:
        time.sleep(0.02)

    def first(self) -> None:
        time.sleep(0.002)

    second = first

    def weights(self) -> list[Tensor]:
        return []


def test_handing_over_gradients_is_not_on_the_clock() -> None:
    drive = Drive(Sleepy(), Gradients(TINY.shapes), Clock())
    assert 0.004 <= drive.sample(2) < 0.02


def test_rounds_interleave_and_begin_with_each_in_turn() -> None:
    order: list[str] = []

    class Recorded(Drive):
        def sample(self, steps: int) -> float:
            order.append(self.stepper)  # type: ignore[arg-type]
            return 1.0

    gradients, clock = Gradients(TINY.shapes), Clock()
    drives = {name: Recorded(name, gradients, clock) for name in "abc"}  # type: ignore[arg-type]
    taken = measure(drives, steps=1, rounds=3)
    assert "".join(order) == "abc" + "abc" + "bca" + "cab"  # the first three warm up
    assert len(taken.copy) == 3 and all(len(seconds) == 3 for seconds in taken.seconds.values())


def test_ratios_are_paired() -> None:
    # Everything ten times slower in the second round: the paired ratio does not see it.
    ratio = Summary.of_ratios([2.0, 20.0, 2.0], [1.0, 10.0, 1.0])
    assert ratio == Summary(2.0, 2.0, 2.0)
    assert Summary.of([1.0, 2.0, 3.0, 4.0, 5.0]) == Summary(3.0, 2.0, 4.0)


class Hungry(FlatStepper):
    """Two more copies of the weights kept, and three at once now and then."""

    def __init__(self, weights: Sequence[Tensor]) -> None:
        super().__init__(weights)
        self.kept = [torch.empty_like(self.data) for _ in range(2)]

    def first(self) -> None:
        held = [torch.empty_like(self.data) for _ in range(3)]
        super().first()
        held.clear()


def test_memory_is_the_peak_of_state_and_temporaries() -> None:
    size = SIZES["small_cnn"]
    weights, gradients = problem(size)

    def per_parameter(build: Any) -> float:
        return memory.peak_extra_bytes(Contender("", "", build), weights, gradients) / size.parameters

    plain = per_parameter(FlatStepper)
    assert plain == pytest.approx(8.0, abs=0.1)  # momentum, and the saved copy
    # The peak is in the second step's first(): momentum is there by then.
    assert per_parameter(Hungry) - plain == pytest.approx(4.0 * (2 + 3), abs=0.1)


# ---- results
# -----------------------------------------------------------------------------------------------------------


def record_of(*results: dict[str, Any]) -> dict[str, Any]:
    environment = {
        "command": "python -m bench.step --made-up", "date": "2031-02-03T00:00:00+00:00",
        "commit": "0123456789abcdef+changes",
        "machine": {"cpu": "a CPU", "cores": 2, "caches": {"L1": "32K"}, "memory_gib": 4.0},
        "versions": {"python": "3.11", "torch": "2.13", "pytorch-optimizer": "4.1.0"},
    }  # fmt: skip
    return {"kind": report.KIND, "environment": environment, "floor_bytes_per_parameter": 40, "results": list(results)}


def test_a_run_from_the_command_line(tmp_path: Path) -> None:
    out = tmp_path / "out"
    arguments = [
        "--sizes",
        "small_cnn",
        "--contenders",
        "flat,copied,fastsam_foreach",
        "--threads",
        "1",
        "--rounds",
        "3",
        "--out",
        str(out),
    ]
    for start in (["-m", "bench.step"], [str(ROOT / "bench" / "step.py")]):
        done = subprocess.run(
            [sys.executable, *start, *arguments], cwd=ROOT, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        assert "small client CNN: 20 tensors, 51,994 parameters, 1 thread; 3 rounds" in done.stdout
        assert done.stderr == ""
    record = report.read(out / report.JSON)
    assert record["environment"]["command"].startswith("python -m bench.step --sizes small_cnn")
    (result,) = record["results"]
    by_name = {row["name"]: row for row in result["contenders"]}
    assert by_name["copied"]["to_copied"]["median"] == 1.0
    assert by_name["fastsam_foreach"]["ours"] and by_name["fastsam_foreach"]["seconds"]["median"] > 0
    flat = by_name["flat"]
    fraction = 40 * result["parameters"] / result["copy_bytes_per_second"]["median"] / flat["seconds"]["median"]
    assert flat["floor_fraction"]["median"] == pytest.approx(fraction, rel=0.9)
    assert (out / report.PNG).read_bytes().startswith(b"\x89PNG")
    shown = subprocess.run(
        [sys.executable, "-m", "bench.report", str(out / report.JSON)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert f"| {flat['title']} | {flat['to_copied']['median']:.2f} |" in shown.stdout


@pytest.mark.of_each_kind
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--sizes", "resnet81"], "there is no size 'resnet81'; did you mean 'resnet18'?"),
        (["--contenders", "copied,flatt"], "there is no contender 'flatt'; did you mean 'flat'?"),
        (["--threads", "0"], "--threads takes whole numbers from 1, got '0'"),
        (["--rounds", "0"], "--rounds takes whole numbers from 1, got '0'"),
    ],
)
def test_wrong_usage(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        step.parse(arguments)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("content", ["not json", "[]", '{"kind": "something else"}'])
def test_a_foreign_file_is_refused(content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "step.json"
    path.write_text(content)
    assert report.main([str(path)]) == 1
    assert "expected" in capsys.readouterr().err


@pytest.mark.of_each_kind
def test_results_that_are_there_survive_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = step.Bench(TINY, [contenders()["flat"]])
    record = record_of(bench.run(1, step.progress_bar(None)))
    report.write(record, tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert set(before) == {report.JSON, report.PNG}

    def fail(*arguments: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(report, "plot", fail)
    with pytest.raises(OSError, match="no space left"):
        report.write(record | {"results": []}, tmp_path)
    assert {name: (tmp_path / name).read_bytes() for name in before} == before
    assert json.loads(before[report.JSON])["results"]


# ---- what is published
# -------------------------------------------------------------------------------------------------

RESULTS = ROOT / "bench" / "results" / report.JSON


@pytest.mark.of_each_kind
def test_published_numbers_are_those_of_the_results() -> None:
    pages = [path for path in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")) if "<!-- bench:" in path.read_text()]
    assert ROOT / "docs" / "benchmarks.md" in pages
    for page in pages:
        text = page.read_text()
        command = f"python -m bench.report {RESULTS.relative_to(ROOT)} --into {page.relative_to(ROOT)}"
        assert report.fill(text, report.read(RESULTS)) == text, f"numbers differ from the results; run {command}"


@pytest.mark.of_each_kind
def test_the_reference_is_no_contender() -> None:
    """It is a specification, not a choice."""
    tables = report.sections(report.read(RESULTS))
    assert "**fastsam (native)**" in tables["choices"]
    assert not any("fastsam (reference)" in table for table in tables.values())


@pytest.mark.of_each_kind
def test_published_results_were_all_measured() -> None:
    results = report.read(RESULTS)["results"]
    assert {(r["size"], r["threads"]) for r in results} == {(size, threads) for size in SIZES for threads in (1, 2)}
    for result in results:
        missing = {row["name"] for row in result["contenders"] if row["gate"] != "green"}
        assert missing == {"fastsam_triton"}, report.reasons([result])


@pytest.mark.of_each_kind
def test_marked_places_are_filled_and_the_rest_is_left() -> None:
    flat = {"name": "flat", "title": "flat", "ours": False, "gate": "green", "extra_bytes_per_parameter": 8.04}
    flat |= {
        key: {"median": 0.5, "q1": 0.4, "q3": 0.6} for key in ("seconds", "to_copied", "to_flat", "floor_fraction")
    }
    red = {"name": "x", "title": "x", "ours": False, "gate": "red", "reason": "it raised"}
    result = {"title": "T", "threads": 2, "busy_others": 0.25, "contenders": [flat, red]}
    record = record_of(result)
    text = "before\n<!-- bench:memory -->\nold\n<!-- /bench -->\nafter <!-- bench:made -->\n<!-- /bench -->\n"
    filled = report.fill(text, record)
    assert "old" not in filled and filled.startswith("before\n<!-- bench:memory -->\nPeak memory")
    assert "| flat | 8.0 |\n<!-- /bench -->\nafter" in filled
    assert "commit `0123456789ab+changes`" in filled and "Not measured: x: it raised." in filled
    assert report.fill(filled, record) == filled
    for wrong, message in (
        ("nothing", "there is no place marked"),
        ("<!-- bench:x -->\n<!-- /bench -->", "there is no section 'x'"),
    ):
        with pytest.raises(ValueError, match=message):
            report.fill(wrong, record)
