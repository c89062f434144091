"""What an algorithm costs beside FedAvg: a clock that is told what steps and rounds take; what fails; one real cost."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import pytest
from torch import nn

from bench import federated
from bench.fed import overhead
from bench.fed.workload import Workload
from bench.timing import Summary
from fastsam import fed


class Costly:
    """Trains nothing, but the clock says that it took time: so much a step, and so much more a round."""

    PER_ROUND: ClassVar = {"fedavg": 0.5, "scaffold": 1.5, "fedcm": 0.5}
    PER_STEP: ClassVar = {"fedavg": 0.25, "scaffold": 0.25, "fedcm": 0.375}

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.log, self.failing, self.untrained = 0.0, list[str](), "", ""
        self.time = self.perf_counter = self.process_time = lambda: self.now
        monkeypatch.setattr(overhead, "time", self)
        monkeypatch.setattr(overhead.ours, "train", self.train)
        monkeypatch.setattr(overhead, "ALGORITHMS", ("scaffold", "fedcm"))
        monkeypatch.setattr(overhead, "PROTECTED", {})
        monkeypatch.setattr(Workload, "loss_of", lambda load, model: 3.0 if load.algorithm == self.untrained else 0.5)

    def train(self, load: Workload, rounds: int, tick: Callable[[], None], option: str) -> nn.Module:
        assert option == "sequential"
        for round in range(rounds):
            self.log.append(load.algorithm)
            if load.algorithm == self.failing and round == 1:
                raise ValueError("no such vector")
            self.now += (
                dict(load.options).get("more", 0)
                + self.PER_ROUND[load.algorithm]
                + self.PER_STEP[load.algorithm] * 4 * load.cohort * load.epochs
            )
            tick()
        return nn.Identity()


@pytest.mark.parametrize(("model", "cohort"), [("mlp", 20), ("cnn", 4)])
def test_a_steps_cost_is_what_it_adds_to_a_round(model: str, cohort: int, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Costly(monkeypatch)
    found = overhead.compare(model, "sequential", "cpu", 3)
    assert found.title == f"{model.upper()}, sequential" and [c.label for c in found.costs] == ["scaffold", "fedcm"]
    scaffold, fedcm = found.costs
    for cost, step, whole in ((scaffold, 1.0, 21.5 / 20.5), (fedcm, 1.5, 30.5 / 20.5)):
        assert cost.problem is None and cost.step is not None and cost.round is not None
        assert [cost.step.median, cost.step.q1, cost.step.q3] == [step] * 3
        assert cost.round.median == pytest.approx(whole) and cost.seconds == Summary(*[0.25 * step] * 3)
    turns, runs = 1 + 3, 2 if cohort == 20 else 3
    each = turns * runs * overhead.ROUNDS[model]
    assert [clock.log.count(n) for n in ("scaffold", "fedcm", "fedavg")] == [each + runs] * 2 + [2 * (each + runs)]


def test_what_protects_clients_is_beside_plain_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    Costly(monkeypatch)
    monkeypatch.setattr(overhead, "ALGORITHMS", ())
    monkeypatch.setattr(overhead, "PROTECTED", {"hidden": (("more", 20.5),)})
    (cost,) = overhead.compare("cnn", "sequential", "cpu", 2).costs
    assert (cost.label, cost.problem, cost.step, cost.seconds) == ("hidden", None, None, None)
    assert cost.round is not None and cost.round.median == 2


def test_in_a_turn_an_algorithm_is_beside_fedavg(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Costly(monkeypatch)
    overhead.compare("cnn", "sequential", "cpu", 1)
    ends = ["scaffold"] * 3 + ["fedavg"] * 3  # the last rounds, which nobody times
    assert clock.log[:18] == [*["fedavg", "scaffold"] * 3, *["scaffold", "fedavg"] * 3, *ends]
    assert clock.log[18:24] == ["fedavg", "fedcm"] * 3


def test_an_algorithm_that_fails_is_left_out_with_its_last_words(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = threading.active_count()
    clock = Costly(monkeypatch)
    clock.failing = "scaffold"
    scaffold, fedcm = overhead.compare("mlp", "sequential", "cpu", 2).costs
    assert scaffold.problem == "scaffold: ValueError: no such vector" and scaffold.step is None
    assert fedcm.problem is None and fedcm.step is not None and fedcm.step.median == 1.5
    clock.failing = "fedavg"
    assert {c.problem for c in overhead.compare("mlp", "sequential", "cpu", 2).costs} == {
        "fedavg: ValueError: no such vector"
    }
    assert threading.active_count() == threads


@pytest.mark.parametrize(("untrained", "left"), [("fedcm", ["scaffold"]), ("fedavg", [])])
def test_a_cost_counts_only_where_training_worked(
    untrained: str, left: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Costly(monkeypatch).untrained = untrained
    costs = overhead.compare("mlp", "sequential", "cpu", 1).costs
    assert [c.label for c in costs if c.problem is None] == left
    assert all("did not train: loss 3" in str(c.problem) for c in costs if c.label not in left)


@pytest.mark.of_each_kind
def test_one_real_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overhead, "ALGORITHMS", ("scaffold",))
    monkeypatch.setattr(overhead, "PROTECTED", {})
    monkeypatch.setattr(overhead, "ROUNDS", {"mlp": 1})
    (cost,) = overhead.compare("mlp", "auto", "cpu", 1).costs
    assert cost.problem is None and cost.round is not None and cost.round.median > 0
    assert all(name in fed.algorithms.registry for name in overhead.ALGORITHMS)


def test_the_command_measures_overheads_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    one = Summary(1, 1, 1)
    asked: list[tuple[str, int]] = []

    def pretend(device: str, turns: int) -> list[overhead.Costs]:
        asked.append((device, turns))
        problem = "broken" if len(asked) > 1 else None
        return [overhead.Costs("MLP, auto", [overhead.Cost("fedcm", one, one, one, problem)], 0.0)]

    monkeypatch.setattr(overhead, "measure", pretend)
    assert federated.main(["--parts", "overhead", "--chunks", "5", "--out", str(tmp_path)]) == 0
    assert (
        json.loads((tmp_path / "federated.json").read_text())["parts"]["overhead"][0]["costs"][0]["step"]["median"] == 1
    )
    assert federated.main(["--parts", "overhead", "--quick"]) == 1
    assert asked == [("cpu", 8), ("cpu", 6)]


def test_a_part_measured_again_is_joined_to_the_others(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    one = Summary(1, 1, 1)
    costs = [overhead.Costs("MLP, auto", [overhead.Cost("fedcm", one, one, one)], 0.0)]
    monkeypatch.setattr(overhead, "measure", lambda device, turns: costs)
    command = ["--parts", "overhead", "--out", str(tmp_path)]
    path = tmp_path / "federated.json"
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


def test_noise_of_a_small_model_is_timed_over_all_rounds_it_is_drawn_for(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Costly(monkeypatch)
    monkeypatch.setattr(overhead, "ALGORITHMS", ())
    monkeypatch.setattr(overhead, "PROTECTED", {"noisy": (("noise_multiplier", 1.0),)})
    for model, rounds in (("mlp", 64 * 5 // 2), ("cnn", 1)):  # the first turn is not counted
        clock.log.clear()
        overhead.compare(model, "sequential", "cpu", 1)
        assert len(clock.log) == 2 * (2 * rounds + 1)
