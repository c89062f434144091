"""The benchmarks: each runs with `--quick`, refuses a wrong contender, and times only the measured code."""

import time
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bench import __main__ as command
from bench import case as cases
from bench import contenders as bench_contenders
from bench import correctness, memory, ops, steps, whole_steps
from bench import record as records
from bench.contenders import (
    VARIANTS,
    Contender,
    DeviceForeachStepper,
    FlatStepper,
    ForeachStepper,
    OptimizerStepper,
    Stepper,
    contenders,
    ours,
    variant_contenders,
)
from bench.kernel_cases import OPS, STEP, KernelCase, kernel_cases
from bench.kernel_data import MAX_SETS, Operator
from bench.questions import QUESTIONS
from bench.timing import ROTATION, Machine, interleave, intra_op_threads, ratios
from bench.workload import KERNEL_SIZES, LR, MOMENTUM, RHO, SIZES, WEIGHT_DECAY, Gradients, Size, initial_weights
from fastsam import SAM, backends, variants
from fastsam.lab.copied_class import CopiedSAM
from fastsam_kernels import native, reference
from tests.helpers.bench_machine import Small

TINY = Size("tiny", "tiny", ((40, 25), (40,), (), (3, 0)), steps=2, rounds=3)
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    with intra_op_threads(1):
        yield


# ---- the command

QUICK = {
    "step": ["--cases", "small_cnn-1", "whole/mlp", "--rows", "flat", "copied", "fastsam_foreach"],
    "variants": ["--cases", "small_cnn"],
    "kernels": ["--cases", "steps/50k", "norm-50k-*"],
    "evidence": ["--cases", "*/mlp-0", "--rows", "SGD", "SAM", "rho 0.1", "start 0.5", "FedAvg"],
    "language": ["--rows", "AdamW"],
    "federated": ["--cases", "speed-1/MLP, unequal clients, fedavg", "--rows", "fastsam, sequential"],
}


@pytest.mark.of_each_kind
@pytest.mark.parametrize(
    "question", [pytest.param(name, marks=pytest.mark.slow) if name == "language" else name for name in QUICK]
)
def test_a_quick_run_gives_a_figure_for_every_row(
    question: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cases, "Machine", Small)
    assert command.main([question, "--quick", "--rounds", "2", *QUICK[question], "--out", str(tmp_path)]) == 0
    record = records.read(tmp_path / f"{question}.json")
    assert record["quick"] and record["cases"]
    rows = list(records.rows(record))
    compiled = {"fastsam_native", "fastsam_exclusive", "native"} if native.why_not("cpu") else set()
    assert {row["name"] for row in rows if records.has_failed(row)} <= {"fastsam_triton", "triton"} | compiled
    output = capsys.readouterr().out
    assert rows and all(row["title"] in output for row in rows)
    assert set(QUICK) | {"ncu"} == set(QUESTIONS)


@pytest.mark.of_each_kind
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["step", "--cases", "resnet81"], "no case has these names: ['resnet81']"),
        (["step", "--rows", "flatt"], "no case has these names"),
        (["step", "--rounds", "0"], "--rounds takes whole numbers from 1, got 0"),
        (["federated", "--peer", "tff=/bin/true"], "--peer takes NAME=PYTHON of flower"),
        (["steps"], "invalid choice: 'steps'"),
    ],
)
def test_wrong_usage(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as error:
        command.parse(arguments)
    assert error.value.code == 2 and message in capsys.readouterr().err


def test_a_run_adds_what_a_file_lacks_and_ends_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cases, "Machine", Small)
    run = ["kernels", "--quick", "--rows", "reference", "--add", "--out", str(tmp_path), "--cases"]
    path = tmp_path / "kernels.json"
    assert command.main([*run, "norm-50k-flat"]) == 0
    first = records.read(path)
    assert command.main([*run, "norm-50k-*"]) == 0
    record = records.read(path)
    assert [case["name"] for case in record["cases"]] == ["norm-50k-flat", "norm-50k-scattered"]
    assert record["cases"][0] == first["cases"][0] and len(record["added"]) == 1
    assert command.main([*run, "inner-50k-flat", "--seconds", "-1"]) == 1
    assert records.read(path)["left_out"] == ["inner-50k-flat"]
    assert "no time left for inner-50k-flat" in capsys.readouterr().out
    assert command.main([*run, "inner-50k-flat"]) == 0
    assert records.read(path)["left_out"] == []
    text = path.read_text()
    path.write_text(text.replace('"reference"', '"native"').replace(record["cases"][0]["made"], "commit 0 yesterday"))
    with pytest.raises(SystemExit, match="ops/norm-50k-flat: rows of commit 0 yesterday and of commit"):
        command.main([*run, "norm-50k-flat"])
    path.write_text(text)
    with pytest.raises(SystemExit, match="cannot be added"):
        command.main([word for word in run if word != "--quick"] + ["norm-50k-flat"])


# ---- the correctness check


def test_a_peer_that_is_not_installed_is_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_contenders, "find_spec", lambda name: None)
    peers = [contenders()[name] for name in ("pytorch_optimizer", "copied")]
    rows = whole_steps.measure(peers, whole_steps.TRAININGS["mlp"], Small(CPU), 1)["rows"]
    assert rows[0]["absent"] == "pytorch-optimizer is not installed" and "eager" in rows[1]


@pytest.mark.of_each_kind
@pytest.mark.parametrize("size", [TINY, SIZES["small_cnn"]], ids=lambda size: size.name)
def test_contenders_and_variants_agree_with_the_reference(size: Size) -> None:
    entrants = [c for c in (*contenders().values(), *variant_contenders(peers=False).values()) if not c.absent]
    eager_entrants = [c for c in entrants if not c.compiles and not c.name.startswith("pytorch")]
    accepted, errors = correctness.check(eager_entrants, initial_weights(size.shapes), Gradients(size.shapes))
    assert errors == {} and list(accepted) == [c.name for c in eager_entrants]


def test_the_functions_of_the_compiled_contender_agree_with_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    size, contender = TINY, contenders()["compiled"]
    accepted, errors = correctness.check([contender], initial_weights(size.shapes), Gradients(size.shapes))
    assert errors == {} and list(accepted) == ["compiled"]


class NoRestoreStepper(ForeachStepper):
    """A stepper that updates the perturbed weights."""

    def second(self) -> None:
        self.optimizer.step()


class NanStepper(FlatStepper):
    """A stepper that sets one weight to NaN."""

    def second(self) -> None:
        super().second()
        self.data[7] = float("nan")


class RaisingStepper(FlatStepper):
    def second(self) -> None:
        raise RuntimeError("this one does not work here")


def _sam(**changes: float) -> Callable[[Sequence[Tensor]], OptimizerStepper]:
    options = {"rho": RHO, "lr": LR, "momentum": MOMENTUM, "weight_decay": WEIGHT_DECAY, **changes}
    return lambda weights: OptimizerStepper(weights, lambda p: CopiedSAM(p, torch.optim.SGD, **options))


def test_a_wrong_contender_is_not_timed_in_whole_steps() -> None:
    entrants = [Contender("ours", "ours", ours(), backend="auto"), Contender("wrong", "wrong", _sam(rho=10 * RHO))]
    training = whole_steps.TRAININGS["mlp"]._replace(steps=1)
    case = whole_steps.measure(entrants, training, Small(CPU), rounds=2)
    assert "eager" in case["rows"][0] and "eager" not in case["rows"][1]
    assert "the loss after a step is" in case["rows"][1]["problem"]


WRONG = {
    "rho off by a thousandth": (_sam(rho=RHO * 1.001), "perturbation of step 1: tensor 0 has "),
    "momentum off by a thousandth": (_sam(momentum=MOMENTUM * 0.999), "weights after step 2: tensor 0 has "),
    "no weight decay": (_sam(weight_decay=0.0), "weights after step 1: tensor 0 has "),
    "not restored": (NoRestoreStepper, "weights after step 1: tensor 0 has "),
    "NaN": (NanStepper, "weights after step 1: tensor 0 has nan where "),
    "raising": (RaisingStepper, "raised RuntimeError: this one does not work here"),
}


@pytest.mark.of_each_kind
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_contender_gets_a_reason_and_no_time(name: str) -> None:
    build, message = WRONG[name]
    case = steps.measure(
        [Contender("wrong", "wrong", build), contenders()["flat"]], TINY, Small(), 3, references=("flat",)
    )
    first, second = case["rows"]
    assert message in first["problem"] and "eager" not in first
    assert second["eager"]["to"]["flat"]["median"] == 1.0


@pytest.mark.of_each_kind
@pytest.mark.parametrize("change", ["sum", "one element", "backup", "nan", "raises"])
def test_a_wrong_op_gets_a_reason_and_no_figure(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong_backend = types.ModuleType("wrong")

    def norm_(sumsq: torch.Tensor, grads: Any, *rest: Any) -> None:
        reference.norm_(sumsq, grads, *rest)
        sumsq.mul_(1.0001)

    def perturb_(params: Any, backup: torch.Tensor, grads: Any, *rest: Any) -> None:
        reference.perturb_(params, backup, grads, *rest)
        if change == "raises":
            raise RuntimeError("not today")
        target, index, value = {"backup": (backup[:, 0], 0, 1e-5), "nan": (params[0].view(-1), 0, torch.nan)}.get(
            change, (params[0].view(-1), 3, 1e-5)
        )
        target[index] += value

    wrong_backend.norm_, wrong_backend.perturb_ = norm_, perturb_  # type: ignore[attr-defined]
    entry = backends.Backend("native", "cpu", "reference", lambda: None)
    monkeypatch.setattr(backends.Backend, "load", lambda self: wrong_backend if self is entry else reference)
    backend = backends.Backend("reference", "cpu", "reference", lambda: None)
    monkeypatch.setattr(backends, "table", lambda: (entry, backend))
    op = OPS["norm" if change == "sum" else "perturb"]
    wrong_row, fine = ops.measure(KernelCase(op, TINY, "scattered"), Small(), 3, 10.0)["rows"]
    assert wrong_row["problem"] and "eager" not in wrong_row and fine["eager"]["seconds"]["median"] > 0


@pytest.mark.parametrize("layout", ["scattered", "flat"])
def test_the_gate_of_an_op_leaves_the_input(layout: str) -> None:
    def tensors(operator: Operator) -> list[Tensor]:
        values = operator.sets[0].values()
        return [t.clone() for value in values for t in ([value] if isinstance(value, Tensor) else value)]

    for backend in (b for b in backends.table() if b.device == "cpu" and b.name != "triton" and b.available):
        for op in (op for op in OPS.values() if hasattr(backend.load(), op.function)):
            operator = Operator(KernelCase(op, Size("rows2", "", ((20, 9), (7,)), rows=2), layout), CPU, 1)
            old_inputs = tensors(operator)
            assert operator.check(backend.load()) is None, op.name
            assert all(torch.equal(a, b) for a, b in zip(old_inputs, tensors(operator), strict=True)), op.name


# ---- what is measured


class Sleepy(Stepper):
    """A stepper that needs 20 ms to take gradients, and 2 ms for a phase."""

    def set_grads(self, gradients: Gradients, index: int) -> None:
        time.sleep(0.02)

    def phases(self) -> Sequence[Callable[[], object]]:
        return (lambda: time.sleep(0.002),) * 2


def test_handing_over_gradients_is_not_on_the_clock() -> None:
    pool = steps.StepperPool(Small(), [Sleepy()], [Gradients(TINY.shapes)])
    assert 0.004 <= pool.eager(2) < 0.02


@pytest.mark.of_each_kind
def test_rounds_interleave_and_end_in_time() -> None:
    order: list[str] = []
    samples = {name: (lambda name=name: order.append(name) or 1.0) for name in "abc"}
    timings = interleave(samples, 3, lambda: 5.0)
    assert "".join(order) == "abc" + "abc" + "bca" + "cab"  # the first three warm up
    assert timings.copies == [5.0] * 3 and all(len(seconds) == 3 for seconds in timings.seconds.values())
    assert timings.figures("a", 10, {"b": "b"})["fraction"]["median"] == 2.0
    assert len(interleave(samples, 100, max_seconds=0.0).seconds["a"]) == 3, "as few as there may be"
    # Everything ten times slower in the second round: the paired ratio does not see it.
    assert set(ratios([2.0, 20.0, 2.0], [1.0, 10.0, 1.0]).values()) == {2.0}


class Hungry(FlatStepper):
    """A stepper that keeps two more copies of the weights, and allocates three at once in some phases."""

    def __init__(self, weights: Sequence[Tensor]) -> None:
        super().__init__(weights)
        self.tensors = [torch.empty_like(self.data) for _ in range(2)]

    def first(self) -> None:
        buffers = [torch.empty_like(self.data) for _ in range(3)]
        super().first()
        buffers.clear()


def test_memory_is_the_peak_of_state_and_temporaries() -> None:
    size = SIZES["small_cnn"]
    weights, gradients = initial_weights(size.shapes), Gradients(size.shapes)
    plain, hungry = (
        memory.peak_extra_bytes(Contender("", "", build), weights, gradients) / size.parameters
        for build in (FlatStepper, Hungry)
    )
    assert plain == pytest.approx(8.0, abs=0.1)  # momentum, and the saved copy
    # The peak is in the second step's first(): momentum is there by then.
    assert hungry - plain == pytest.approx(4.0 * (2 + 3), abs=0.1)


def test_a_machine_with_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "peak_extra_bytes", lambda *arguments: 8 * TINY.parameters)
    entrants, counts = [contenders()[name] for name in ("foreach", "copied")], ("memory", "launches", "replays")
    case = steps.measure(entrants, TINY, Small(cuda=True), 3, references=("copied",), counts=counts)
    for row in case["rows"]:
        assert row["launches"] == 3 and row["extra_bytes_per_parameter"] == 8.0
        assert row["host_seconds"]["unchanged"] > 0 and row["host_seconds"]["changed"] > 0
        assert all(row[mode]["to"]["copied"]["median"] > 0 for mode in ("eager", "replayed"))
    machine = Small(cuda=True)
    case = KernelCase(OPS["update"], Size("rows100", "", TINY.shapes, rows=2), "scattered")
    result = ops.measure(case, machine, 3, 9.0)
    rows = {row["name"]: row for row in result["rows"]}
    assert rows["reference"]["launches"] == 3 and "replayed" not in rows["reference"]
    replay_count = sum("replayed" in row for row in rows.values())
    assert replay_count and machine.num_captured == replay_count
    assert machine.num_queued == result["rounds"] + replay_count * (1 + result["rounds"]), (
        "replays begin behind other work"
    )


def test_the_peer_of_the_device_is_the_one_by_hand() -> None:
    """The same perturbation without reading the norm on the host."""
    weights, gradients = initial_weights(TINY.shapes), Gradients(TINY.shapes)
    pair = DeviceForeachStepper(weights), ForeachStepper(weights)
    for stepper in pair:
        for index in range(4):
            stepper.set_grads(gradients, index)
            stepper.phases()[index % 2]()
    for a, b in zip(pair[0].weights(), pair[1].weights(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


@pytest.mark.of_each_kind
def test_the_launch_of_a_replay_is_off_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """On an emulated device: a queue with a time, in microseconds, which the host fills and does not wait for."""
    log, clocks = [], {"host": 0.0, "device": 0.0}

    def queue(label: str, microseconds: float, call: float = 10.0) -> float:
        log.append(label)
        clocks["host"] += call
        clocks["device"] = max(clocks["device"], clocks["host"]) + microseconds
        return clocks["device"]

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            self.record = lambda: setattr(self, "at", queue("event", 0.0, call=1.0))

        def elapsed_time(self, last: Any) -> float:
            return (last.at - self.at) / 1e3  # type: ignore[attr-defined,no-any-return]

    def read_event(name: str) -> Any:
        return types.SimpleNamespace(max=lambda: queue(name, 250.0))

    machine: Any = object.__new__(Machine)
    machine.cuda, machine._source, machine._sweep = True, read_event("read"), read_event("sweep")
    machine.wait = lambda: clocks.update(host=max(clocks.values()))
    monkeypatch.setattr(torch.cuda, "Event", Event)
    replay = lambda: queue("body", 5.0, call=100.0)  # noqa: E731 - its launch takes the host far longer than the device
    assert machine.sample(replay, is_queued=True) == pytest.approx(5e-6)
    assert machine.sample(replay) > 100e-6, "what an idle device would do to a replay too"
    assert machine.sample(replay, cold=True, is_queued=True) == pytest.approx(5e-6)
    timing_log = ["event", "body", "event"]
    assert log == ["read", "read", *timing_log, *timing_log, "read", "read", "sweep", *timing_log]


# ---- the cases


@pytest.mark.of_each_kind
def test_every_kernel_case_once_and_what_matters_first() -> None:
    kernel_list = list(kernel_cases(list(KERNEL_SIZES.values()), list(OPS.values())))
    names = [case.name for case in kernel_list]
    assert len(set(names)) == len(names)
    uncut_sizes = [size for size in KERNEL_SIZES if not size.startswith("cut")]
    expected = {f"{op}-{size}-{layout}" for op in OPS for size in uncut_sizes for layout in ("scattered", "flat")}
    assert expected - set(names) == {f"accumulate-{size}-scattered" for size in uncut_sizes}, (
        "it knows whole fields only"
    )
    first = names.index("norm-resnet18-flat")
    assert all(case.op.name in STEP and case.layout == "scattered" for case in kernel_list[:first])
    case = KernelCase(OPS["perturb"], TINY, "flat")
    assert len(Operator(case, CPU, cache_bytes=8192).sets) == -(-ROTATION * 8192 // (3 * 4 * TINY.parameters))
    assert len(Operator(case, CPU, cache_bytes=1 << 30).sets) == MAX_SETS


def test_every_variant_is_there() -> None:
    members = (getattr(variants, name) for name in variants.__all__)
    kinds = {kind for kind in members if isinstance(kind, type) and issubclass(kind, SAM)}
    assert {type(sam) for sam, *_ in VARIANTS.values()} == kinds
