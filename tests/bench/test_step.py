"""The optimizer part of a step: no time for a wrong result, what is on the clock, the commands."""

from __future__ import annotations

import itertools
import json
import re
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bench import family, gate, memory, report, step
from bench.contenders import (
    SGD_OPTIONS,
    Contender,
    FlatStepper,
    ForeachStepper,
    OptimizerStepper,
    Stepper,
    contenders,
    parameters,
)
from bench.copied_sam import CopiedSAM
from bench.problem import LR, MOMENTUM, RHO, SIZES, WEIGHT_DECAY, Gradients, Size, initial_weights
from bench.timing import Summary, interleave, intra_op_threads
from bench.whole_steps import Fleet
from fastsam import SAM, FusedSAM, variants
from tests.helpers.bench_machine import Small
from tests.helpers.places import ROOT

TINY = Size("tiny", "tiny", ((40, 25), (40,), (), (3, 0)), steps=2, rounds=3)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    with intra_op_threads(1):
        yield


# ---- the gate


@pytest.mark.of_each_kind
@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if c.compiles else n for n, c in
                                  contenders().items()])  # fmt: skip
def test_contenders_agree_with_the_reference(name: str) -> None:
    contender = contenders()[name]
    if (reason := contender.why_not()) is not None:
        pytest.skip(reason)
    for size in (TINY, SIZES["small_cnn"]):
        green, red = gate.check([contender], initial_weights(size.shapes), Gradients(size.shapes))
        assert red == {} and list(green) == [name]


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
    result = step.measure(Small(), TINY, [Contender("wrong", "wrong", build), contenders()["flat"]], 3)
    first, second = result["contenders"]
    assert first["gate"] == "red" and message in first["reason"]
    assert "seconds" not in first and "to_flat" not in first
    assert second["gate"] == "green" and second["to_flat"]["median"] == 1.0


# ---- what is counted


class Sleepy(Stepper):
    """Handing over gradients takes 20 ms, a phase takes 2 ms."""

    def take(self, gradients: Gradients, index: int) -> None:
        time.sleep(0.02)

    def first(self) -> None:
        time.sleep(0.002)

    second = first


def test_handing_over_gradients_is_not_on_the_clock() -> None:
    fleet = Fleet(Small(), [Sleepy()], [Gradients(TINY.shapes)])
    assert 0.004 <= fleet.eager(2) < 0.02


@pytest.mark.of_each_kind
def test_rounds_interleave_and_end_in_time() -> None:
    order: list[str] = []
    samples = {name: (lambda name=name: order.append(name) or 1.0) for name in "abc"}
    taken = interleave(samples, 3, lambda: 5.0)
    assert "".join(order) == "abc" + "abc" + "bca" + "cab"  # the first three warm up
    assert taken.copies == [5.0] * 3 and all(len(seconds) == 3 for seconds in taken.seconds.values())
    assert taken.figures("a", 10)["fraction"]["median"] == 2.0
    assert len(interleave(samples, 100, most=0.0).seconds["a"]) == 3, "as few as there may be"


def test_ratios_are_paired() -> None:
    # Everything ten times slower in the second round: the paired ratio does not see it.
    assert Summary.of_ratios([2.0, 20.0, 2.0], [1.0, 10.0, 1.0]) == Summary(2.0, 2.0, 2.0)
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
    weights, gradients = initial_weights(size.shapes), Gradients(size.shapes)

    def per_parameter(build: Any) -> float:
        return memory.peak_extra_bytes(Contender("", "", build), weights, gradients) / size.parameters

    plain = per_parameter(FlatStepper)
    assert plain == pytest.approx(8.0, abs=0.1)  # momentum, and the saved copy
    # The peak is in the second step's first(): momentum is there by then.
    assert per_parameter(Hungry) - plain == pytest.approx(4.0 * (2 + 3), abs=0.1)


# ---- the commands


def test_a_run_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = "flat,copied,fastsam_foreach"
    options = ["--quick", "--sizes", "small_cnn", "--threads", "1", "--rounds", "3", "--out", str(tmp_path)]
    assert step.main([*options, "--contenders", names]) == 0
    assert "small client CNN: 20 tensors, 51,994 parameters, 1 thread; 3 rounds" in capsys.readouterr().out
    record = report.read(tmp_path / "step.json")
    rows = {row["name"]: row for row in record["results"][0]["contenders"]}
    assert list(rows) == names.split(",") and rows["copied"]["to_copied"]["median"] == 1.0
    assert rows["fastsam_foreach"]["ours"] and rows["flat"]["extra_bytes_per_parameter"] == pytest.approx(8, abs=0.1)
    assert f"| {rows['flat']['title']} | {rows['flat']['to_copied']['median']:.2f} |" in report.markdown(record)
    assert (tmp_path / "step.png").read_bytes().startswith(b"\x89PNG")
    assert step.main([*options, "--variants"]) == 0
    rows = {row["name"]: row for row in report.read(tmp_path / "family.json")["results"][0]["variants"]}
    assert list(rows) == list(family.ENTRIES) and rows["SAM"]["to_sam"]["median"] == 1.0
    assert (rows["SAM"]["kernels"], rows["SAM"]["torch_calls"]) == (3.0, 0.0)


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
    assert stopped.value.code == 2 and message in capsys.readouterr().err


@pytest.mark.of_each_kind
def test_published_results_were_all_measured() -> None:
    results = json.loads((ROOT / "bench" / "results" / "step.json").read_text())["results"]
    assert {(r["size"], r["threads"]) for r in results} == set(itertools.product(SIZES, (1, 2)))
    for result in results:
        assert {row["name"] for row in result["contenders"] if row["gate"] != "green"} == {"fastsam_triton"}


# ---- SAM's variants


def test_every_variant_is_there() -> None:
    kinds = {
        kind for name in variants.__all__ if isinstance(kind := getattr(variants, name), type) and issubclass(kind, SAM)
    }
    assert {type(entry.sam) for entry in family.ENTRIES.values()} == kinds


def test_the_bytes_are_those_of_the_page() -> None:
    rows = (ROOT / "docs" / "variants.md").read_text().split("| variant | rule |")[1].split("\n\n")[0].splitlines()[2:]
    page = {"WSAM": "64", "LookSAM": f"{(96 + 9 * 32) / 10:g}"}
    for row in rows:
        page.setdefault(re.findall(r"\w+", row)[0], row.rsplit("|", 2)[1].split()[0])
    for name in page.keys() & family.ENTRIES.keys():
        assert page[name] == f"{family.ENTRIES[name].floor:g}", name


@pytest.mark.parametrize("name", ["SAM", "WSAM", "LookSAM", "MSAM"])
def test_a_step_is_a_training_loops(name: str) -> None:
    shapes = ((40, 25), (40,))
    fleet = family.fleet_of(family.Ours, family.ENTRIES[name], Small(), Size("tiny", "tiny", shapes))
    (stepper, gradients), params, passes = fleet.pairs[0], parameters(initial_weights(shapes)), iter(range(100))
    opt = FusedSAM(params[1:] + params[:1], torch.optim.SGD, variant=family.ENTRIES[name].sam, **SGD_OPTIONS)

    def closure() -> None:
        for p, g in zip(params, gradients.tensors(next(passes)), strict=True):
            p.grad = g.clone()

    for _ in range(3):
        fleet.steps()
        opt.step(closure)
    for found, expected in zip(stepper.weights(), params, strict=True):
        torch.testing.assert_close(found, expected.detach(), rtol=1e-6, atol=1e-8)


@pytest.mark.of_each_kind
def test_variants_have_figures_on_a_gpu_only_where_they_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    some: dict[str, Any] = {name: family.ENTRIES[name] for name in ("SAM", "WSAM")}
    monkeypatch.setattr(family, "ENTRIES", some)
    assert family.wrong(some["WSAM"], Small()) == ""
    other = Small()
    other.device = torch.device("meta")
    assert "Error" in family.wrong(some["SAM"], other)
    result = family.measure(Small(cuda=True), TINY, 3, {"WSAM": "weights differ"})
    sam, wsam = result["variants"]
    assert sam["to_sam"]["median"] == 1 and sam["seconds"]["median"] > 0 and wsam["problem"] == "weights differ"
