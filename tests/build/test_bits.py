"""The comparison of two trees (tools/bits.py): it names the cases that differ, and only these."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.places import ROOT
from tools import bits, bits_fed, bits_optim, bits_options


@pytest.mark.slow
def test_a_changed_tree_differs_only_in_changed_cases(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tree = tmp_path / "tree"
    for name in ("fastsam", "kernels"):
        shutil.copytree(ROOT / name, tree / name)
    for name in ("csrc", "tests"):
        (tree / name).symlink_to(ROOT / name)
    path = tree / "fastsam/fed/algorithms/fedavgm.py"
    path.write_text(path.read_text().replace("hparam(0.9,", "hparam(0.8,"))
    first, second = bits.Worker(ROOT, tmp_path / "here"), bits.Worker(tree, tmp_path / "there")
    assert bits.compare_bits(first, second, ["FedAvg"]) > 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("FedAvgM, ")]
    assert lines == [f"FedAvgM, {name}" for name in (*bits_fed.EXECUTORS, "captured stacks")]
    assert bits.compare_bits(first, second, ["FedSAM, "]) == 0
    assert bits.compare_bits(first, second, ["two ranks: SCAFFOLD"]) == 0
    for worker in (first, second):
        worker.close()


class Answers:
    """A worker that has the outcomes of its cases."""

    def __init__(self, **outcomes: dict[str, str]) -> None:
        self.names, self.outcomes = {"case": [*outcomes]}, outcomes

    def send(self, request: list[str]) -> None:
        self.outcome = self.outcomes[request[1]]

    def answer(self) -> dict[str, str]:
        return self.outcome


def test_differences_have_names_and_an_error_counts(capsys: pytest.CaptureFixture[str]) -> None:
    error = {bits.ERROR: "ValueError: no"}
    new: Any = Answers(equal={"a": "1"}, other={"a": "1", "b": "2", "c": "3"}, bad=error, young={"a": "1"}, late={})
    old: Any = Answers(equal={"a": "1"}, other={"a": "1", "b": "0"}, bad=error, young=error)
    assert bits.compare_bits(new, old, [""]) == 2
    assert capsys.readouterr().out.splitlines() == [
        "other",
        "    b: here 2, there 0",
        "    c: here 3, there None",
        "    1 others are equal",
        "bad: raised ValueError: no",
        "young: left out, the other tree raised ValueError: no",
        "late: left out, the other tree does not have it",
        "5 cases, 2 with differences or errors, 2 left out",
    ]


CASES = dict([*bits_fed.cases(), *bits_options.cases()])


def test_an_outcome_has_every_tensor_and_every_key_of_the_records() -> None:
    outcome = CASES["SCAFFOLD, sequential"]()
    names = ["weight 0.weight", "server.w", "server.c", "client 3.c_i", "record train_loss", "record clients"]
    assert {*names} <= {*outcome} and not any("seconds" in name for name in outcome)
    assert CASES["SCAFFOLD, threads"]() == outcome  # resumed, with the same bits
    other = CASES["FedAvg, sequential"]()
    assert {name for name in outcome if other.get(name) == outcome[name]} >= {"record clients", "captures"}
    assert all(other.get(name) != outcome[name] for name in names[:-1])


def test_captures_and_replays_are_counted() -> None:
    for name in ("FedSMOO, graph", "FedSMOO, captured stacks"):
        outcome = CASES[name]()
        assert int(outcome["replays"]) > int(outcome["captures"]) > 0


def test_a_refusal_is_an_outcome_and_an_end_of_it_an_error() -> None:
    assert CASES["MOON, graph"]() == {"refused": "ValueError"}
    with pytest.raises(RuntimeError, match="is not refused any more"):
        bits_fed.refusal(CASES["FedAvg, sequential"])


def test_every_case_has_a_name_of_its_own() -> None:
    modules = (bits_fed, bits_options, bits_optim)
    names = [name for module in modules for name, _ in module.cases()]
    assert len(set(names)) == len(names) > 1000
