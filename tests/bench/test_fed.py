"""The federated benchmark: turns and the gate, with processes that only pretend to train; and one real race."""

import json
import os
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from bench import ROOT
from bench import __main__ as command
from bench.fed import cases, cores, overhead, peers, process
from bench.fed.bare import Flat, Tensors
from bench.fed.race import Entry, race
from bench.fed.worker import Chunks
from bench.fed.workload import Workload
from bench.timing import intra_op_threads
from fastsam import fed

LOAD = Workload("mlp")

# Answers as a worker does, at once. Its contender's name holds the answer: `NAME SECONDS LOSS [LOG]`. LOG is a file to
# which it writes the time of each request.
PRETENDER = """#!{python}
import json, sys
name, seconds, loss, *log = sys.argv[3].split()
say = lambda what: print(json.dumps(what), flush=True)
if name == "stillborn":
    sys.exit("cannot begin\\nno such library")
if name == "talkative":
    sys.stderr.write("a warning\\n" * 100_000)
say("ready")
for chunk in range(int(sys.argv[5])):
    if not sys.stdin.readline():
        sys.exit("the driver is gone")
    for path in log:
        open(path, "a").write(name + " ")
    if name == "dying" and chunk == 1:
        sys.exit("out of memory")
    if name == "gone" and chunk == 1:
        sys.stdin.close()
        say(1.0)
        sys.exit("left between two turns")
    say(float(seconds) * (1 + chunk))
sys.stdin.readline()
for path in log:
    open(path, "a").write(name + "-end ")
if name == "late":
    sys.exit("failed at the end")
say({{"loss": float(loss), "peak_mib": 12.5}})
"""


@pytest.fixture
def pretender(tmp_path: Path) -> str:
    path = tmp_path / "pretender"
    path.write_text(PRETENDER.format(python=sys.executable))
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def entry(python: str, name: str, seconds: float = 1.0, loss: float = 0.5, log: object = "", **workload: Any) -> Entry:
    return Entry(name, f"{name} {seconds} {loss} {log}", Workload("mlp", **workload), python)


# ---- turns


def test_contenders_take_turns_and_the_first_is_the_unit(pretender: str, tmp_path: Path) -> None:
    log = tmp_path / "log"
    entries = [entry(pretender, name, seconds, log=log) for name, seconds in (("a", 2.0), ("b", 0.5), ("c", 4.0))]
    rows = race(entries, 4, 7)["rows"]
    chunks, ends = ["a", "b", "c", "b", "c", "a", "c", "a", "b", "a", "b", "c"], ["a-end", "b-end", "c-end"]
    assert log.read_text().split() == chunks + ends  # none takes a core for its loss while another trains
    assert [row["name"] for row in rows] == ["a", "b", "c"] and not any("problem" in row for row in rows)
    assert [row["speed"]["median"] for row in rows] == [1, 4, 0.5] and rows[1]["seconds"]["median"] == 1.25
    assert {(row["loss"], row["peak_mib"]) for row in rows} == {(0.5, 12.5)}


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("stillborn", "no such library"),
        ("dying", "out of memory"),
        ("gone", "left between two turns"),
        ("late", "failed at the end"),
    ],
)
def test_one_that_dies_is_left_out_with_its_last_words(pretender: str, name: str, words: str) -> None:
    rows = race([entry(pretender, "a"), entry(pretender, name), entry(pretender, "b", 0.5)], 3, 1)["rows"]
    assert [row.get("problem") for row in rows] == [None, words, None]
    assert "speed" not in rows[1] and rows[2]["speed"]["median"] == 2


def test_one_that_says_much_to_its_log_does_not_stop(pretender: str) -> None:
    assert "problem" not in race([entry(pretender, "talkative")], 1, 1)["rows"][0]


def test_one_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "PATIENCE", 0.2)
    sleeper = tmp_path / "sleeper"
    sleeper.write_text("#!/bin/sh\nexec sleep 60\n")
    sleeper.chmod(0o755)
    assert "exit -15" in race([entry(str(sleeper), "a")], 1, 1)["rows"][0]["problem"]


@pytest.mark.of_each_kind
@pytest.mark.parametrize(("loss", "is_good"), [(0.84, True), (0.86, False), (float("nan"), False)])
def test_a_figure_counts_only_where_training_worked(pretender: str, loss: float, is_good: bool) -> None:
    row = race([entry(pretender, "a"), entry(pretender, "b", loss=loss)], 1, 1)["rows"][1]
    assert ("problem" not in row, "speed" in row) == (is_good, is_good)
    assert is_good or "did not train" in row["problem"]


def test_a_worker_times_chunks_of_rounds_and_waits_after_each() -> None:
    reports: list[float] = []
    orders = iter([None, None, None])
    clock = iter([0.0, 10.0, 12.0, 20.0, 22.0, 26.0, 30.0, 40.0])
    chunks = Chunks(3, 2, reports.append, lambda: next(orders), int, clock=lambda: next(clock))
    for _ in range(7):
        chunks.tick()
    assert reports == [5.0, 4.0, 2.0] and chunks.total == 6 and list(orders) == []


# ---- cores

AFFINITY = "import os, subprocess, sys; print(len(os.sched_getaffinity(0)), flush=True)"


@pytest.mark.of_each_kind
def test_a_process_and_its_children_keep_to_their_cores() -> None:
    own_cores = os.sched_getaffinity(0)
    child = f"{AFFINITY}; subprocess.run([sys.executable, '-c', {AFFINITY!r}])"
    for number in (1, None):
        worker = process.Process([sys.executable, "-c", child], {}, num_cores=number)
        assert [worker.answer(), worker.answer()] == [number or len(own_cores)] * 2
        worker.close()
    assert os.sched_getaffinity(0) == own_cores
    with pytest.raises(ValueError, match="expected 1 to"), cores.restrict(len(own_cores) + 1):
        raise AssertionError


@pytest.mark.of_each_kind
def test_the_cpu_time_of_a_process_includes_its_descendants() -> None:
    spin = "import time\nwhile time.process_time() < 0.1: pass\n"
    spin_and_wait = f"{spin}print(1, flush=True)\ninput()"
    code = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {spin!r}])\n"  # it has ended
    code += f"subprocess.run([sys.executable, '-c', {spin_and_wait!r}])\n"
    worker = process.Process([sys.executable, "-c", code], {})
    assert worker.answer() == 1 and cores.cpu_seconds(worker.process.pid) >= 0.2 - 1 / os.sysconf("SC_CLK_TCK")
    worker.close()
    assert cores.cpu_seconds(worker.process.pid) == 0


@pytest.mark.of_each_kind
def test_a_row_that_used_more_than_it_was_given_is_refused(pretender: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU seconds of turns that take ten seconds: `greedy` uses two processors."""

    class Use(cores.Use):
        def __init__(self, pid: int) -> None:
            super().__init__(pid, iter(range(0, 1000, 10)).__next__)

    seconds_of_turn = {"a": 10.2, "greedy": 20.0, "two": 20.0, "b": 3.0}
    monkeypatch.setattr(cores, "Use", Use)
    entries = [entry(pretender, name) for name in seconds_of_turn]
    entries[2] = replace(entries[2], cores=min(2, cores.available()))
    names, totals = dict[int, str](), dict[int, float]()

    def cpu_seconds(pid: int) -> float:
        if pid not in names:
            names[pid] = list(seconds_of_turn)[len(names)]
            totals[pid] = -seconds_of_turn[names[pid]]
        totals[pid] += seconds_of_turn[names[pid]]
        return totals[pid]

    monkeypatch.setattr(cores, "cpu_seconds", cpu_seconds)
    rows = race(entries, 1, 1)["rows"]
    assert [row["processors"] for row in rows] == [1.02, 2.0, 2.0, 0.3]
    assert [row["cores"] for row in rows] == [1, 1, entries[2].cores, 1]
    words = "it used 2.00 processors, and 1 core was expected. Tell it how many cores it has"
    assert [row.get("problem") for row in rows] == [None, words, None if cores.available() > 1 else words, None]
    assert "speed" not in rows[1] and "speed" in rows[3]
    seconds_of_turn["a"] = 30.0
    names.clear()
    rows = race(entries, 1, 1)["rows"]
    assert "it used 3.00" in rows[0]["problem"] and rows[3]["problem"] == "the unit 'a' failed"


@pytest.mark.of_each_kind
def test_contenders_have_the_cores_of_their_race() -> None:
    pythons = dict.fromkeys(("flower", "pfl", "fedlab", "fedjax", "blazefl", "jax"), sys.executable)
    for model in ("mlp", "cnn"):
        one, two = (make(Workload(model), pythons) for make in (cases.entries_of_one_core, cases.entries_of_two_cores))
        assert {(e.cores, e.threads) for e in one} == {(1, 1)} and {*pythons} < {e.label for e in one}
        assert {e.cores for e in two if e.label.endswith(cases.ONE_CORE)} == {1}
        assert {(e.cores, e.threads) for e in two if not e.label.endswith(cases.ONE_CORE)} == {(2, 2)}
        labels = {f"{name}{cases.ONE_CORE}" for name in ("bare loop", "pfl", "fedlab", "fedjax", "jax")}
        assert labels == {e.label for e in two if e.cores == 1}


@pytest.mark.of_each_kind
def test_simulators_that_train_at_once_know_their_number_of_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their libraries are mocks: Ray would take all processors of the machine, whatever the affinity is."""
    names = ("flwr", "flwr.app", "flwr.clientapp", "flwr.serverapp", "flwr.serverapp.strategy", "flwr.simulation")
    modules = {name: mock.MagicMock() for name in (*names, "blazefl")}
    modules["flwr.serverapp.strategy"].FedAvg = object
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    for number in {1, cores.available()}:
        with cores.restrict(number), intra_op_threads(1):
            peers.flower(LOAD, 1, int)
            peers.blazefl(LOAD, 1, int)
        config = modules["flwr.simulation"].run_simulation.call_args.kwargs["backend_config"]
        assert config["init_args"] == {"num_cpus": number} and config["client_resources"]["num_cpus"] == 1
        trainer = modules["blazefl"].contrib.FedAvgThreadPoolClientTrainer
        assert trainer.call_args.kwargs["num_parallels"] == number


def test_a_plain_install_has_no_compiled_kernels() -> None:
    code = "from bench.fed import plain; from bench.fed.workload import Workload; from fastsam import backends\n"
    code += "load = Workload('mlp', clients=4, cohort=4); plain.train(load, 1, int, 'vmap')\n"
    code += "assert backends.backend('cpu') == 'foreach'"
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], cwd=ROOT, check=True)


# ---- the workload


def parameters(load: Workload) -> int:
    return sum(p.numel() for p in load.make_model().parameters())


def test_the_models_and_the_data_are_those_of_the_description() -> None:
    assert parameters(Workload("cnn")) == 225_034
    assert parameters(LOAD) == 64 * 32 + 32 + 32 * 10 + 10
    assert parameters(Workload("mlp:1333")) == 75 * 1333 + 10
    data = LOAD.data()
    assert len(data) == 100 and all(x.shape == (64, 64) and y.shape == (64,) for x, y in data)
    assert {x.dtype for x, _ in data} == {np.dtype("float32")}
    assert set(np.concatenate([y for _, y in data])) == set(range(10))
    assert Workload("cnn", clients=2).data()[1][0].shape == (64, 1, 28, 28)


@pytest.mark.of_each_kind
@pytest.mark.parametrize("sharp", [False, True])
def test_both_bare_loops_take_the_same_steps(sharp: bool) -> None:
    x, y = LOAD.tensors()[0]
    ends = []
    for kind in (Tensors, Flat):
        model = LOAD.make_model()
        local = kind(model, sharp)
        for _ in range(3):
            local.step(x, y)
        ends.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    torch.testing.assert_close(ends[0], ends[1], rtol=1e-5, atol=1e-6)
    # The bare SAM step is SAM: at the same weights another step than SGD's.
    if sharp:
        plain = Tensors(model := LOAD.make_model(), False)
        for _ in range(3):
            plain.step(x, y)
        assert not torch.allclose(ends[0], torch.cat([p.detach().flatten() for p in model.parameters()]), atol=1e-5)


# ---- what an algorithm costs


def test_a_steps_cost_is_what_it_adds_to_a_round(pretender: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that pretend to take so long a step, and so much longer a round."""

    def make_entry(label: str, contender: str, load: Workload, cores: int) -> Entry:
        algorithm = dict(load.options).get("name", load.algorithm)
        per_round = {"fedavg": 0.5, "scaffold": 1.5, "fedcm": 0.5, "hidden": 21.0}[algorithm]
        seconds = per_round + {"fedcm": 0.375}.get(algorithm, 0.25) * 4 * load.cohort * load.epochs
        return Entry(label, f"{label.replace(' ', '-')} {seconds} 0.5", load, pretender, cores=cores)

    monkeypatch.setattr(overhead, "Entry", make_entry)
    for model in ("mlp", "cnn"):
        for name, step, round_time in (("scaffold", 1.0, 21.5 / 20.5), ("fedcm", 1.5, 30.5 / 20.5)):
            comparison = overhead.compare(name, Workload(model, name), "sequential", 1)
            assert comparison["step"]["median"] == step and comparison["seconds"]["median"] == 0.25 * step
            assert comparison["round"]["median"] == pytest.approx(round_time)
    hidden_comparison = overhead.compare("hidden", Workload("cnn", options=(("name", "hidden"),)), "sequential", 1)
    assert hidden_comparison["round"]["median"] == 2 and "step" not in hidden_comparison
    assert all(name in fed.algorithms.registry for name in overhead.ALGORITHMS)


@pytest.mark.slow
def test_one_real_cost() -> None:
    comparison = overhead.compare("scaffold", Workload("mlp", "scaffold", lr=overhead.LR), "sequential", 1)
    assert "problem" not in comparison and comparison["round"]["median"] > 0


# ---- the command


@pytest.mark.of_each_kind
def test_the_command_writes_what_it_has_and_fails_when_ours_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[tuple[list[str], int, int]] = []
    broken_label = "pfl"

    def fake_race(entries: list[Entry], chunks: int, rounds: int) -> dict[str, Any]:
        calls.append(([e.label for e in entries], chunks, rounds))
        row = {"seconds": {"median": 1.0, "q1": 1.0, "q3": 1.0}, "speed": {"median": 1.0, "q1": 1.0, "q3": 1.0}}
        return {"rows": [{"name": e.label, "title": e.label, "ours": e.ours,
                          **({"problem": "broken"} if e.label == broken_label else row)} for e in entries]}  # fmt: skip

    monkeypatch.setattr(cases, "race", fake_race)
    run = ["federated", "--quick", "--cases", "speed-1/*", "--out", str(tmp_path)]
    assert command.main([*run, "--peer", f"pfl={sys.executable}"]) == 0
    results = json.loads((tmp_path / "federated.json").read_text())["cases"]
    assert [case["title"] for case in results] == [
        "MLP, unequal clients, fedavg", "MLP, unequal clients, fedsam", "CNN, unequal clients, fedavg",
        "CNN, unequal clients, fedsam", "MLP, digits, alpha 0.3, fedavg", "MLP, equal clients, fedavg",
        "CNN, equal clients, fedavg", "MLP with LayerNorm and GELU, unequal clients, fedavg",
    ]  # fmt: skip
    assert calls[0][0][0] == "bare loop" and "pfl" in calls[0][0] and "pfl" not in calls[1][0]
    assert {a[1:] for a in calls} == {(3, 3), (3, 1)}
    assert "Not measured: pfl: broken." in capsys.readouterr().out
    broken_label = "fastsam, vmap"
    assert command.main(run) == 1


def test_other_simulators_train_in_environments_without_fastsam() -> None:
    prelude = "import sys; sys.modules |= {'fastsam': None, 'fastsam_kernels': None}"
    code = f"{prelude}; import bench.fed.worker, bench.fed.peers"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
