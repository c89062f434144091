"""`fastsam reproduce --tune`: each method's values from one grid, found on samples that the table does not report."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from fastsam.fed.data import FederatedData
from fastsam.lab import cli
from fastsam.lab.config import ConfigError
from fastsam.lab.reproduce import tuning

ASKED = ["reproduce", "fedlesam-table5", "--scale", "--rounds", "2", "--seeds", "0", "--tune", "lr=0.02,0.3"]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("tune") / "t5"
    assert cli.main([*ASKED, "--tune", "rho=0.05", "--run-dir", str(made)]) == 0
    return made


def summary_of(directory: Path) -> dict[str, Any]:
    return json.loads((directory / "summary.json").read_text())


def test_each_method_runs_with_what_was_best_on_the_held_out_samples(directory: Path) -> None:
    tuned = summary_of(directory)["tuning"]
    assert tuned["grid"] == ["lr=0.02,0.3", "rho=0.05"] and tuned["held_out"] == 0.2
    points = [point for point in tuned["points"] if point["algorithm"] == "fedsam"]
    assert sorted((p["point"]["lr"], p["point"]["rho"]) for p in points) == [("0.02", "0.05"), ("0.3", "0.05")]
    (taken,) = (point for point in points if point["taken"])
    assert taken["accuracy"] == max(point["accuracy"] for point in points)
    (config,) = directory.glob("cifar*/fedsam-seed0/config.json")
    run = json.loads(config.read_text())
    assert f"{run['lr']:g}" == taken["point"]["lr"] and run["fedsam"]["rho"] == 0.05
    plain = [point["point"] for point in tuned["points"] if point["algorithm"] == "fedavg"]
    assert sorted(p["lr"] for p in plain) == ["0.02", "0.3"] and all("rho" not in p for p in plain)


def test_the_report_prints_the_grid_and_the_command(directory: Path) -> None:
    text = (directory / "report.md").read_text()
    assert "Grid: lr=0.02,0.3; rho=0.05, the same for every method. Seed 1000" in text
    assert "--tune lr=0.02,0.3 --tune rho=0.05" in text
    row = next(line for line in text.split("Tuned: ")[1].splitlines() if line.startswith("| FedAvg |"))
    assert [cell.strip() for cell in row.split("|")][3] == "–" and "lr" in row.split("|")[-2], "lr has two values"


def test_a_resumed_table_tunes_nothing_again(directory: Path) -> None:
    records = {path: path.read_text() for path in directory.glob("tuning/*/*/metrics.jsonl")}
    assert len(records) == 14 and all('"seconds"' in text for text in records.values())
    before = summary_of(directory)
    assert cli.main([*ASKED, "--tune", "rho=0.05", "--run-dir", str(directory), "--resume"]) == 0
    assert {path: path.read_text() for path in records} == records, "with the seconds that they took"
    assert summary_of(directory)["tuning"] == before["tuning"]


@pytest.mark.parametrize(
    ("asked", "flags", "said"),
    [
        (["fedsam.rho=0.1,0.2"], [], "keys of all methods"),
        (["lr"], [], "written key=value"),
        (["split=iid,dirichlet"], [], "numbers such as lr=0.1,0.2"),
        ([""], ["--lr", "0.1"], "lr is tuned, and a flag gives it"),
        ([""], ["--fedsam.rho", "0.1"], "rho is tuned, and a flag gives it"),
    ],
)
def test_what_is_no_grid(asked: list[str], flags: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        tuning.grid(asked, [0], flags)


def test_the_seed_is_none_of_the_tables() -> None:
    assert tuning.grid([""], [0, 1], []) == tuning.grid(list(tuning.GRID), [0], [])
    assert tuning.grid([""], [3, 1000], []).seed == 1001


def test_what_is_held_out_are_the_clients_own_samples() -> None:
    sizes = (4, 5, 23)
    numbers = torch.arange(sum(sizes)).float().split(sizes)
    test = (torch.full((3, 1), -1.0), torch.zeros(3, dtype=torch.int64))
    data = FederatedData([(x[:, None], torch.zeros(len(x), dtype=torch.int64)) for x in numbers], test, classes=1)
    made = tuning.held_out(data)
    assert [len(y) for _, y in made.clients] == [4, 4, 19] and len(made.test[1]) == 0 + 1 + 4
    together = torch.cat([*(x for x, _ in made.clients), made.test[0]]).flatten()
    assert together.sort().values.tolist() == list(range(sum(sizes))), "each sample once, none of the test set"
    again = tuning.held_out(data)
    assert all(torch.equal(a[0], b[0]) for a, b in zip(made.clients, again.clients, strict=True))
    few = FederatedData([(torch.zeros(4, 1), torch.zeros(4, dtype=torch.int64))], test, classes=1)
    with pytest.raises(ValueError, match="no client has five samples"):
        tuning.held_out(few)


def test_ties_and_missing_runs() -> None:
    low, high = (("lr", "0.1"),), (("lr", "0.2"),)
    assert tuning.best({"fedavg": {low: 0.5, high: 0.5}}, "fedavg") == low
    assert tuning.best({}, "fedavg") == ()
