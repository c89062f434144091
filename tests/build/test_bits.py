"""The comparison of two trees (tools/bits.py): it names the cases that differ, and only these."""

import shutil
from pathlib import Path

import pytest

from tests.helpers.places import ROOT
from tools import bits, bits_fed


@pytest.mark.slow
def test_a_changed_tree_differs_only_in_changed_cases(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tree = tmp_path / "tree"
    shutil.copytree(ROOT / "fastsam", tree / "fastsam")
    shutil.copytree(ROOT / "kernels", tree / "kernels")
    (tree / "csrc").symlink_to(ROOT / "csrc")
    path = tree / "fastsam/fed/algorithms/fedavgm.py"
    path.write_text(path.read_text().replace("hparam(0.9,", "hparam(0.8,"))
    first, second = bits.Worker(ROOT, tmp_path / "here"), bits.Worker(tree, tmp_path / "there")
    assert bits.compare_bits(first, second, "FedAvg") > 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("FedAvgM ")]
    assert lines == ["FedAvgM sequential", "FedAvgM vmap", "FedAvgM threads resumed"]
    assert bits.compare_bits(first, second, "FedSAM sequential") == 0
    for worker in (first, second):
        worker.close()


def test_hashes_follow_weights_states_and_records() -> None:
    cases = dict(bits_fed.cases())
    hashes = {name: cases[name]().split() for name in ("FedAvg sequential", "FedAvgM sequential", "FedNova sequential")}
    assert cases["FedAvg sequential"]().split() == hashes["FedAvg sequential"]
    for position, part in enumerate(("weights", "states", "records")):
        values = {parts[position] for parts in hashes.values()}
        assert len(values) == 3
        assert all(value.startswith(f"{part}=") for value in values)


def test_every_case_has_a_name_of_its_own() -> None:
    names = [name for name, _ in bits_fed.cases()]
    assert len(set(names)) == len(names) > 200
