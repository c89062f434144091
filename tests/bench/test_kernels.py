"""The kernel benchmark: no figure without agreement, the bytes of the registry, sets larger than the caches, and its
tables and plots.

What it does on a GPU is run here with a machine that says it has one: events, graphs and launch counts are stood in
for.
"""

from __future__ import annotations

import json
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import kernels, memory, report, tables, whole_steps
from bench.contenders import contenders
from bench.kernel_cases import KERNEL_SIZES, OPS, STEP, KernelCase, cut, kernel_cases
from bench.kernel_data import MAX_SETS, Operator
from bench.kernels import OpBench
from bench.problem import Gradients, Size, initial_weights
from bench.timing import ROTATION, Machine, intra_op_threads
from bench.whole_steps import DeviceForeachStepper
from fastsam import backends
from fastsam_kernels import reference
from tests.helpers.bench_machine import Small, record_of

TINY = Size("cut3", "tiny in 3", ((20, 9), (7,), (3, 3)))
ROWS = Size("rows2", "two rows", ((20, 9), (7,)), rows=2)
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    with intra_op_threads(1):
        yield


@pytest.mark.of_each_kind
def test_every_case_once_and_what_matters_first() -> None:
    cases = list(kernel_cases(list(KERNEL_SIZES.values()), list(OPS.values())))
    names = [case.name for case in cases]
    assert len(set(names)) == len(names)
    whole = [size for size in KERNEL_SIZES if not size.startswith("cut")]
    wanted = {f"{op}-{size}-{layout}" for op in OPS for size in whole for layout in ("scattered", "flat")}
    assert wanted - set(names) == {f"accumulate-{size}-scattered" for size in whole}, "it knows whole fields only"
    first = names.index("norm-resnet18-flat")
    assert all(case.op.name in STEP and case.layout == "scattered" for case in cases[:first])


@pytest.mark.of_each_kind
def test_sets_are_larger_than_the_caches() -> None:
    case = KernelCase(OPS["perturb"], TINY, "flat")
    assert len(Operator(case, CPU, cache_bytes=8192).sets) == -(-ROTATION * 8192 // (3 * 4 * TINY.parameters))
    assert len(Operator(case, CPU, cache_bytes=1 << 30).sets) == MAX_SETS, (
        "then the caches are swept before every sample"
    )
    assert OpBench(case, Small()).cold is False
    pointers = {t.data_ptr() for operands in Operator(case, CPU, 8192).sets for t in operands["grads"]}
    assert len(pointers) == len(Operator(case, CPU, 8192).sets)


# ---- the gate


@pytest.mark.parametrize("backend", [b for b in backends.table() if b.device == "cpu"], ids=lambda b: b.name)
@pytest.mark.parametrize("size", [pytest.param(TINY, marks=pytest.mark.of_each_kind), ROWS], ids=lambda s: s.name)
@pytest.mark.parametrize("layout", ["scattered", "flat"])
def test_backends_pass_and_leave_the_input(backend: backends.Backend, size: Size, layout: str) -> None:
    if not backend.available:
        pytest.skip(str(backend.reason))
    module = backend.load()
    for op in OPS.values():
        if not hasattr(module, op.function):
            continue
        operator = Operator(KernelCase(op, size, layout), CPU, 1)
        before = [t.clone() for value in operator.sets[0].values() for t in _tensors(value)]
        assert operator.gate(module) is None, op.name
        assert all(torch.equal(a, b) for a, b in zip(before, _all(operator), strict=True)), op.name


def _tensors(value: Any) -> list[torch.Tensor]:
    return [value] if isinstance(value, torch.Tensor) else list(value)


def _all(operator: Operator) -> list[torch.Tensor]:
    return [t for value in operator.sets[0].values() for t in _tensors(value)]


def wrong_kernels(change: str) -> types.ModuleType:
    """The reference with one thing wrong."""
    module = types.ModuleType("wrong")

    def norm_(sumsq: torch.Tensor, grads: Any, *rest: Any) -> None:
        reference.norm_(sumsq, grads, *rest)
        sumsq.mul_(1.0001 if change == "sum" else 1.0)

    def perturb_(params: Any, backup: torch.Tensor, grads: Any, *rest: Any) -> None:
        reference.perturb_(params, backup, grads, *rest)
        if change == "one element":
            params[0].view(-1)[3] += 1e-5
        if change == "backup":
            backup[:, 0] += 1e-5
        if change == "nan":
            params[0].view(-1)[0] = torch.nan
        if change == "raises":
            raise RuntimeError("not today")

    module.norm_, module.perturb_ = norm_, perturb_  # type: ignore[attr-defined]
    return module


@pytest.mark.parametrize(
    "change", ["sum", pytest.param("one element", marks=pytest.mark.of_each_kind), "backup", "nan", "raises"]
)
def test_a_wrong_op_gets_a_reason_and_no_figure(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = wrong_kernels(change)
    entry = backends.Backend("native", "cpu", "reference", lambda: None)
    monkeypatch.setattr(backends.Backend, "load", lambda self: wrong if self is entry else reference)
    monkeypatch.setattr(
        backends, "table", lambda: (entry, backends.Backend("reference", "cpu", "reference", lambda: None))
    )
    op = OPS["norm" if change == "sum" else "perturb"]
    result = OpBench(KernelCase(op, TINY, "scattered"), Small()).run(3, 10.0)
    bad, good = result["rows"]
    assert bad["gate"] == "red" and "eager" not in bad and bad["reason"]
    assert good["gate"] == "green" and good["eager"]["seconds"]["median"] > 0
    assert tables.reasons(record_of(ops=[result])) == [f"Not measured: native: {bad['reason']}."]


# ---- what is measured


def test_an_op_on_a_machine_with_graphs() -> None:
    machine, size = Small(cuda=True), Size("rows100", "few rows", ROWS.shapes, rows=2)
    result = OpBench(KernelCase(OPS["update"], size, "scattered"), machine).run(3, 10.0)
    rows = {row["name"]: row for row in result["rows"]}
    assert rows["reference"]["launches"] == 3 and "replayed" not in rows["reference"]
    if rows["native"]["gate"] == "green":
        assert {"eager", "replayed"} <= set(rows["native"])
    replayed = sum("replayed" in row for row in rows.values())
    assert replayed and machine.captured == replayed
    copies = result["rounds"]
    assert machine.queued == copies + replayed * (1 + result["rounds"]), "replays and copies begin behind other work"
    assert result["parameters"] == ROWS.parameters == 2 * 187 and result["bytes_per_parameter"] == 20


def test_whole_steps_on_a_machine_with_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "peak_extra_bytes", lambda *arguments: 8 * TINY.parameters)
    machine = Small(cuda=True)
    result = whole_steps.on_size(TINY, machine, 3, 10.0, "without")
    rows = {row["name"]: row for row in result["rows"]}
    assert "compiled" not in rows and rows["foreach"]["title"].endswith("on the device")
    for name in ("fastsam_foreach", "foreach", "copied"):
        row = rows[name]
        assert row["gate"] == "green" and row["launches"] == 3 and row["extra_bytes_per_parameter"] == 8.0
        assert row["host_seconds"]["unchanged"] > 0 and row["host_seconds"]["changed"] > 0
        for how in ("eager", "replayed"):
            assert row[how]["seconds"]["median"] > 0
            assert row[how]["faster_than_copied"]["median"] > 0
    assert rows["copied"]["eager"]["faster_than_copied"] == {"median": 1.0, "q1": 1.0, "q3": 1.0}
    assert rows["fastsam_triton"]["gate"] == "not run"


def test_the_peer_of_the_device_is_the_one_by_hand() -> None:
    """The same perturbation without reading the norm on the host."""
    weights, gradients = initial_weights(TINY.shapes), Gradients(TINY.shapes)
    ours, theirs = DeviceForeachStepper(weights), contenders()["foreach"].build(weights)
    for stepper in (ours, theirs):
        for step in range(2):
            stepper.take(gradients, 2 * step)
            stepper.first()
            stepper.take(gradients, 2 * step + 1)
            stepper.second()
    for a, b in zip(ours.weights(), theirs.weights(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)
    assert whole_steps.of_device(Small(), KERNEL_SIZES["30m"])[-1].name == "copied"


def test_contenders_by_backend_and_by_whether_they_compile() -> None:
    def names(*options: Any) -> list[str]:
        return [c.name for c in whole_steps.of_device(Small(), KERNEL_SIZES["resnet18"], *options)]

    assert names("without", ["native"]) == ["fastsam_native", "fastsam_exclusive", "foreach", "copied"]
    assert names("only", ["native"]) == ["fastsam_native", "fastsam_exclusive", "compiled"]
    assert {"compiled", "foreach", "fastsam_triton"} < set(names())


# ---- the clock of a GPU


@pytest.mark.of_each_kind
def test_the_launch_of_a_replay_is_off_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """On an emulated device: a queue with a time, in microseconds, which the host fills and does not wait for."""
    log, now = [], {"host": 0.0, "device": 0.0}

    def queue(what: str, microseconds: float, call: float = 10.0) -> float:
        log.append(what)
        now["host"] += call
        now["device"] = max(now["device"], now["host"]) + microseconds
        return now["device"]

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            self.record = lambda: setattr(self, "at", queue("event", 0.0, call=1.0))

        def elapsed_time(self, last: Any) -> float:
            return (last.at - self.at) / 1e3  # type: ignore[attr-defined,no-any-return]

    def read(name: str) -> Any:
        return types.SimpleNamespace(max=lambda: queue(name, 250.0))

    machine: Any = object.__new__(Machine)
    machine.cuda, machine._source, machine._sweep = True, read("read"), read("sweep")
    machine.wait = lambda: now.update(host=max(now.values()))
    monkeypatch.setattr(torch.cuda, "Event", Event)
    replay = lambda: queue("body", 5.0, call=100.0)  # noqa: E731 - its launch takes the host far longer than the device
    assert machine.sample(replay, queued=True) == pytest.approx(5e-6)
    assert machine.sample(replay) > 100e-6, "what an idle device would do to a replay too"
    assert machine.sample(replay, cold=True, queued=True) == pytest.approx(5e-6)
    timed = ["event", "body", "event"]
    assert log == ["read", "read", *timed, *timed, "read", "read", "sweep", *timed]


# ---- the command


@pytest.mark.of_each_kind
def test_the_command_writes_adds_and_ends_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(kernels, "Machine", lambda device: Small())
    monkeypatch.setitem(KERNEL_SIZES, "cut10", Size("cut10", "few in 10", cut(5000, 10)))
    command, path = (
        ["--device", "cpu", "--quick", "--sizes", "cut10", "--out", str(tmp_path)],
        tmp_path / "kernels-cpu.json",
    )
    assert kernels.main([*command, "--ops", "norm"]) == 0
    first = report.read(path)
    assert kernels.main([*command, "--parts", "ops", "--ops", "perturb", "--add"]) == 0
    record = report.read(path)
    assert {case["op"] for case in record["ops"]} == {"norm", "perturb"} and record["steps"] == first["steps"]
    assert record["environment"]["command"].count("bench.kernels") == 2
    path.write_text(json.dumps(record | {"environment": record["environment"] | {"commit": "another"}}))
    with pytest.raises(SystemExit, match="of commit another: measure into another folder"):
        kernels.main([*command, "--add"])
    capsys.readouterr()
    assert kernels.main([*command, "--ops", "norm", "--seconds", "0"]) == 1
    assert report.read(path)["left_out"] == ["norm-cut10-scattered", "steps-cut10"]
    assert "no time left for norm-cut10-scattered" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--sizes", "resnet81"], "there is no size 'resnet81'; did you mean 'resnet18'?"),
        (["--ops", "pertrub"], "there is no op 'pertrub'; did you mean 'perturb'?"),
        (["--parts", "step"], "there is no part 'step'; did you mean 'steps'?"),
        (["--device", "cuda"], "torch sees no CUDA device; measure with --device cpu"),
    ],
)
def test_wrong_usage(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    if "cuda" in arguments and torch.cuda.is_available():
        pytest.skip("a GPU is here")
    with pytest.raises(SystemExit) as stopped:
        kernels.parse(["--device", "cpu", "--out", "x", *arguments])
    assert stopped.value.code == 2 and message in capsys.readouterr().err
