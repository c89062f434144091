"""The federated benchmark: turns and the gate, with processes that only pretend to train; and one real race."""

from __future__ import annotations

import json
import stat
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from bench import federated
from bench.fed import on_gpu, overhead, share
from bench.fed import race as races
from bench.fed.bare import Flat, Tensors
from bench.fed.race import Entry, race
from bench.fed.worker import Chunks
from bench.fed.workload import Workload
from bench.timing import Summary
from fastsam import fed

LOAD = Workload("mlp")

# Answers as a worker does, at once. Its contender's name says how: `NAME SECONDS LOSS [LOG]`; in LOG it notes when it
# was asked.
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
    result = race(entries, 4, 7)
    assert log.read_text().split() == ["a", "b", "c", "b", "c", "a", "c", "a", "b", "a", "b", "c"]
    assert [f.label for f in result.figures] == ["a", "b", "c"] and not any(f.problem for f in result.figures)
    assert [f.speed for f in result.figures] == [Summary(1, 1, 1), Summary(4, 4, 4), Summary(0.5, 0.5, 0.5)]
    assert result.figures[1].seconds == Summary.of([0.5, 1.0, 1.5, 2.0])
    assert {(f.loss, f.peak_mib) for f in result.figures} == {(0.5, 12.5)}


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
    result = race([entry(pretender, "a"), entry(pretender, name), entry(pretender, "b", 0.5)], 3, 1)
    assert [f.problem for f in result.figures] == [None, words, None]
    assert result.figures[1].speed is None and result.figures[2].speed == Summary(2, 2, 2)


def test_one_that_says_much_to_its_log_does_not_stop(pretender: str) -> None:
    assert race([entry(pretender, "talkative")], 1, 1).figures[0].problem is None


def test_one_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(races, "PATIENCE", 0.2)
    sleeper = tmp_path / "sleeper"
    sleeper.write_text("#!/bin/sh\nexec sleep 60\n")
    sleeper.chmod(0o755)
    assert "exit -15" in str(race([entry(str(sleeper), "a")], 1, 1).figures[0].problem)


@pytest.mark.of_each_kind
@pytest.mark.parametrize(("loss", "good"), [(0.69, True), (0.71, False), (float("nan"), False)])
def test_a_figure_counts_only_where_training_worked(pretender: str, loss: float, good: bool) -> None:
    figure = race([entry(pretender, "a"), entry(pretender, "b", loss=loss)], 1, 1).figures[1]
    assert (figure.problem is None, figure.speed is not None) == (good, good)
    assert good or "did not train" in str(figure.problem)


def test_a_worker_times_chunks_of_rounds_and_waits_after_each() -> None:
    said: list[float] = []
    orders = iter([None, None])
    clock = iter([0.0, 10.0, 12.0, 20.0, 22.0, 26.0, 30.0])
    chunks = Chunks(3, 2, said.append, lambda: next(orders), clock=lambda: next(clock))
    for _ in range(7):
        chunks.tick()
    assert said == [5.0, 4.0, 2.0] and chunks.total == 6 and list(orders) == []


def test_one_real_race() -> None:
    names = ("bare:tensors", "ours:sequential")
    result = race([Entry(name, name, LOAD) for name in names], 1, 1)
    assert [f.problem for f in result.figures] == [None, None]
    assert all(
        f.seconds is not None and f.seconds.median > 0 and f.peak_mib and f.peak_mib > 50 for f in result.figures
    )
    # 2 rounds from the same weights on the same data: not the same clients, so not the same loss, but near
    plain, ours = (f.loss for f in result.figures)
    assert plain is not None and ours is not None and abs(plain - ours) < 0.2 < ours < 2.3


# ---- the workload


def parameters(load: Workload) -> int:
    return sum(p.numel() for p in load.make_model().parameters())


def test_the_models_and_the_data_are_those_of_the_description() -> None:
    assert parameters(Workload("cnn")) == 225_034
    assert parameters(LOAD) == 64 * 32 + 32 + 32 * 10 + 10
    assert parameters(Workload("mlp:1333")) == 75 * 1333 + 10
    data = LOAD.data()
    assert len(data) == 100 and all(x.shape == (64, 64) and y.shape == (64,) for x, y in data)
    assert {x.dtype for x, _ in data} == {np.dtype("float32")} and set(np.concatenate([y for _, y in data])) == set(
        range(10)
    )
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


# ---- the loop's own share


def test_the_loops_own_share_is_what_is_outside_passes_and_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    before = [getattr(owner, name) for owner, name in share.INSIDE]
    monkeypatch.setattr(share, "Workload", lambda model: Workload("mlp", clients=4, cohort=4))
    found = share.measure(1)
    assert found["seconds"] > 0 and 0 < found["own_share"] < 1
    assert [getattr(owner, name) for owner, name in share.INSIDE] == before


# ---- kernels at once


def kernel(stream: int, begin: float, duration: float) -> dict[str, Any]:
    return {"ts": begin, "dur": duration, "args": {"stream": stream}}


@pytest.mark.parametrize(
    ("kernels", "busy", "at_once", "streams"),
    [
        ([], 0.0, 0.0, 0),
        ([kernel(7, 0, 5), kernel(7, 5, 5)], 1.0, 1.0, 1),
        ([kernel(7, 0, 2), kernel(8, 6, 2)], 0.5, 1.0, 2),
        ([kernel(7, 0, 10), kernel(8, 0, 10), kernel(9, 5, 5), kernel(7, 20, 0)], 0.5, 2.5, 3),
        ([kernel(8, 2, 1), kernel(7, 0, 8)], 1.0, 9 / 8, 2),  # one inside another, and not in their order
    ],
)
def test_how_busy_kernels_keep_a_device(
    kernels: list[dict[str, Any]], busy: float, at_once: float, streams: int
) -> None:
    found = on_gpu.occupation(kernels)
    assert found == {"kernels": len(kernels), "streams": streams, "busy": busy, "at_once": at_once}


def test_what_fails_or_has_no_time_is_named() -> None:
    def fails() -> float:
        raise RuntimeError("no memory")

    job, over = on_gpu.Job("cpu", 100), on_gpu.Job("cpu", -1)
    for work, made, seconds, problem in (
        (fails, job, None, "RuntimeError: no memory"), (fails, over, None, "no time left"), (lambda: 2.0, job, 2.0, "")
    ):  # fmt: skip
        kind, entry = made.series("t", "n", 1, work)
        assert (kind, entry["seconds"], entry["problem"]) == ("series", seconds, problem)
    assert next(over.busy("vmap")) == ("busy", {"executor": "vmap", "clients": 20, "problem": "no time left"})


@pytest.mark.of_each_kind
def test_jobs_cover_executors_and_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process per executor and model; most clients before fewer; no more slots than torch has streams."""
    taken: list[tuple[Any, ...]] = []

    def rounds(load: Workload, rounds: int, **options: Any) -> float:
        taken.append((load.algorithm, options["executor"], options.get("slots")))
        return 1.0

    monkeypatch.setattr(on_gpu, "_load_rounds", rounds)
    monkeypatch.setattr(on_gpu, "_bare_rounds", lambda load, rounds: 1.0)
    monkeypatch.setattr(on_gpu.rowprograms, "maker", maker := on_gpu.rowprograms.maker)  # put back afterwards
    jobs, job = on_gpu.jobs("cuda"), on_gpu.Job("cuda", 100)
    for model in ("cnn", "mlp"):
        for executor in ("bare loop", "sequential", "streams", "graph", "vmap", "auto"):
            found = [entry for _, entry in jobs[f"{model} {executor}"](job)]
            assert [(e["at"], e["name"]) for e in found] == [(n, executor) for n in (100, 100, 20, 20, 8, 8)]
            assert found[0]["title"] == f"{model.upper()}, fedavg, by clients"
    assert ("fedsam", "streams", 31) in taken and ("fedavg", "vmap", 100) in taken and ("fedavg", "auto", None) in taken
    for width in (200, 1024):
        assert next(jobs[f"mlp:{width} vmap"](job))[1]["title"] == f"MLP:{width}, fedavg, by clients"
    assert on_gpu.rowprograms.maker is maker
    assert next(jobs["mlp:200 vmap, without row programs"](job))[1]["seconds"] == 1.0
    assert on_gpu.rowprograms.maker(None) is None


@pytest.mark.of_each_kind
def test_a_job_that_fails_costs_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_gpu, "jobs", lambda device: dict.fromkeys(["no such job", "mlp vmap"]))
    written: list[int] = []
    found = on_gpu.measure("cpu", 60, lambda found: written.append(len(found["series"])))
    failed, done = found["jobs"]
    assert "ended with code 1: KeyError: 'no such job'" in failed["problem"] and not done["problem"]
    assert [s["at"] for s in found["series"]] == [100, 100, 20, 20, 8, 8] and all(s["seconds"] for s in found["series"])
    assert written == [0, 1, 2, 3, 4, 5, 6, 6], "what is measured is written at once"
    assert list(on_gpu.run_job("mlp vmap", "cpu", 1)) == [("jobs", {"name": "mlp vmap", "problem": "no time left"})]


# ---- what an algorithm costs


class Costly:
    """Trains nothing, but the clock says that it took time: so much a step, and so much more a round."""

    PER_ROUND: ClassVar = {"fedavg": 0.5, "scaffold": 1.5, "fedcm": 0.5}
    PER_STEP: ClassVar = {"fedavg": 0.25, "scaffold": 0.25, "fedcm": 0.375}

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.rounds, self.failing, self.untrained = 0.0, 0, "", ""
        self.time = self.perf_counter = self.process_time = lambda: self.now
        monkeypatch.setattr(overhead, "time", self)
        monkeypatch.setattr(overhead.ours, "train", self.train)
        monkeypatch.setattr(Workload, "loss_of", lambda load, model: 3.0 if load.algorithm == self.untrained else 0.5)

    def train(self, load: Workload, rounds: int, tick: Callable[[], None], option: str) -> torch.nn.Module:
        for round in range(rounds):
            if load.algorithm == self.failing and round == 1:
                raise ValueError("no such vector")
            self.rounds += 1
            more = dict(load.options).get("more", 0) + self.PER_ROUND[load.algorithm]
            self.now += more + self.PER_STEP[load.algorithm] * 4 * load.cohort * load.epochs
            tick()
        return torch.nn.Identity()


def test_a_steps_cost_is_what_it_adds_to_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    Costly(monkeypatch)
    for model in ("mlp", "cnn"):
        for name, step, whole in (("scaffold", 1.0, 21.5 / 20.5), ("fedcm", 1.5, 30.5 / 20.5)):
            cost = overhead.compare(name, Workload(model, name), "sequential", 3)
            assert cost.problem is None and cost.step is not None and cost.round is not None
            assert cost.step == Summary(*[step] * 3) and cost.seconds == Summary(*[0.25 * step] * 3)
            assert cost.round.median == pytest.approx(whole)
    hidden = overhead.compare("hidden", Workload("cnn", options=(("more", 20.5),)), "sequential", 2)
    assert (hidden.label, hidden.step, hidden.round) == ("hidden", None, Summary(2, 2, 2))


def test_noise_of_a_small_model_is_timed_over_all_rounds_it_is_drawn_for(monkeypatch: pytest.MonkeyPatch) -> None:
    for model, rounds in (("mlp", 64 * 5), ("cnn", 2)):  # the first turn is not counted, and a round is evaluated
        clock = Costly(monkeypatch)
        overhead.compare("noisy", Workload(model, options=(("privacy", {"noise_multiplier": 1.0}),)), "sequential", 1)
        assert clock.rounds == 2 * (rounds + 1)


@pytest.mark.parametrize("who", ["scaffold", "fedavg"])
def test_an_algorithm_that_fails_or_does_not_train_has_no_cost(who: str, monkeypatch: pytest.MonkeyPatch) -> None:
    threads, clock = threading.active_count(), Costly(monkeypatch)
    clock.failing = who
    load = Workload("mlp", "scaffold")
    assert overhead.compare("s", load, "sequential", 2).problem == f"{who}: ValueError: no such vector"
    assert threading.active_count() == threads
    clock.failing, clock.untrained = "", who
    assert "did not train: loss 3" in str(overhead.compare("s", load, "sequential", 2).problem)


@pytest.mark.of_each_kind
def test_one_real_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overhead, "ROUNDS", {"mlp": 1})
    cost = overhead.compare("scaffold", Workload("mlp", "scaffold", lr=overhead.LR), "auto", 1)
    assert cost.problem is None and cost.round is not None and cost.round.median > 0
    assert all(name in fed.algorithms.registry for name in overhead.ALGORITHMS)


# ---- the command


@pytest.mark.of_each_kind
def test_the_command_writes_what_it_has_and_fails_when_ours_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[tuple[list[str], int, int]] = []

    def pretend(entries: list[Entry], chunks: int, rounds: int) -> races.Result:
        asked.append(([e.label for e in entries], chunks, rounds))
        failing = "pfl" if len(asked) == 1 else "fastsam, vmap" if len(asked) == 6 else ""
        problems = {e.label: "broken" if e.label == failing else None for e in entries}
        one = Summary(1, 1, 1)
        return races.Result(
            [
                races.Figure(k, *(None, None) if p else (one, one), 0.1, None if p else 5.0, p)
                for k, p in problems.items()
            ],
            0.0,
        )

    monkeypatch.setattr(federated, "race", pretend)
    peer = ["--peer", f"pfl={sys.executable}"]
    assert federated.main(["--parts", "speed", "--quick", "--out", str(tmp_path), *peer]) == 0
    parts = json.loads((tmp_path / "federated.json").read_text())["parts"]
    assert [case["title"] for case in parts["speed"]] == ["MLP, fedavg", "MLP, fedsam", "CNN, fedavg", "CNN, fedsam"]
    assert asked[0][0][0] == "bare loop" and "pfl" in asked[0][0] and "pfl" not in asked[1][0]
    assert {a[1:] for a in asked} == {(3, 10), (3, 1)}
    assert "| pfl | failed: broken" in capsys.readouterr().out
    assert federated.main(["--parts", "speed", "--quick"]) == 1
    with pytest.raises(SystemExit):
        federated.main(["--peer", "tff=/bin/true"])


def test_a_part_measured_again_is_joined_to_the_others(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    one = Summary(1, 1, 1)
    costs = [overhead.Costs("MLP, auto", [overhead.Cost("fedcm", one, one, one)], 0.0)]
    monkeypatch.setattr(overhead, "measure", lambda turns: costs)
    command, path = ["--parts", "overhead", "--out", str(tmp_path)], tmp_path / "federated.json"
    assert federated.main(command) == 0
    before = json.loads(path.read_text())
    before |= {"commit": "an older one", "parts": before["parts"] | {"share": {"own_share": 0.5}, "overhead": "old"}}
    path.write_text(json.dumps(before))
    assert federated.main([*command, "--again", str(path)]) == 0
    after = json.loads(path.read_text())
    assert after["commit"] == "an older one" != after["again"]["overhead"]["commit"]
    assert after["parts"]["share"] == {"own_share": 0.5} and after["parts"]["overhead"][0]["title"] == "MLP, auto"
    path.write_text(json.dumps(before | {"versions": {"torch": "1.0"}}))
    with pytest.raises(SystemExit, match="torch 1.0, cpu, and here are .* measure all parts here"):
        federated.main([*command, "--again", str(path)])
    assert json.loads(path.read_text())["parts"]["overhead"] == "old"
