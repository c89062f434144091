"""Runs read back from their directories."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch

from fastsam import fed
from fastsam.lab import cli, config, experiment, load_runs
from fastsam.lab.config import ConfigError
from fastsam.lab.plots import curves
from tests.helpers.fed_rundir import start


@pytest.fixture(scope="module")
def source_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tmp_path = tmp_path_factory.mktemp("saved")
    runs = (("sam-seed0", fed.FedSAM(), 0), ("sam-seed1", fed.FedSAM(), 1), ("avg", fed.FedAvg(), 5))
    for name, algorithm, seed in runs:
        start(tmp_path / "runs" / name, rounds=2, algorithm=algorithm, seed=seed, executor="sequential")
    return tmp_path / "runs"


@pytest.fixture
def runs(source_runs: Path, tmp_path: Path) -> Path:
    return shutil.copytree(source_runs, tmp_path / "runs")


def test_what_is_read(runs: Path) -> None:
    results = load_runs.runs_in(runs)
    assert [(run.label, run.seed, len(run.history)) for run in results] == [("avg", 5, 2), ("sam", 0, 2), ("sam", 1, 2)]
    (one,) = load_runs.runs_in(runs / "avg")
    assert one.label == "fedavg" and one.summary["accuracy_final"] == one.history[-1]["test_accuracy"]
    (runs / "avg" / "summary.json").unlink()  # killed before the end
    assert load_runs.runs_in(runs / "avg")[0].summary == {}
    with pytest.raises(ValueError, match="holds no run: a run directory has a file metrics.jsonl"):
        load_runs.runs_in(runs.parent / "nothing")


def test_the_command_draws_what_was_recorded(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    drawn = []
    draw = curves.curve
    monkeypatch.setattr(curves, "curve", lambda lines, *rest: drawn.append(lines) or draw(lines, *rest))
    assert cli.main(["plots", str(runs / "avg")]) == 0
    assert {f"curves.{end}" for end in ("png", "svg", "pdf")} <= {path.name for path in (runs / "avg").iterdir()}
    assert str(runs / "avg" / "curves.png") in capsys.readouterr().out
    assert cli.main(["plots", str(runs / "avg"), str(runs / "sam-seed0"), "--out", str(tmp_path / "both")]) == 0
    assert cli.main(["plots", str(runs)]) == 0
    labels = [{label: len(histories) for label, histories in lines.items()} for lines in drawn]
    assert labels == [{"FedAvg": 1}, {"avg": 1, "sam-seed0": 1}, {"avg": 1, "sam": 2}]
    assert [record["round"] for record in drawn[0]["FedAvg"][0]] == [1, 2]
    assert (tmp_path / "both" / "curves.png").is_file()


@pytest.mark.parametrize(
    ("words", "message"),
    [(["avg", "sam-seed0"], "2 directories: say with --out where"), (["none"], "none holds no run")],
)
def test_what_cannot_be_drawn(words: list[str], message: str, runs: Path, capsys: pytest.CaptureFixture) -> None:
    assert cli.main(["plots", *(str(runs / word) for word in words)]) == 1
    assert message in capsys.readouterr().err


def make_experiment(weights: str) -> experiment.Experiment:
    flags = ["--model", "mlp", "--clients", "5", "--weights", weights]
    return experiment.build(config.resolve(config.ConfigSource(flags=config.parse_flags(flags)[0])))


def test_a_run_begins_with_the_weights_of_another(tmp_path: Path) -> None:
    fresh = make_experiment("none").model
    expected = {name: torch.randn_like(t) for name, t in fresh.state_dict().items()}
    safetensors.torch.save_file(expected, tmp_path / "model.safetensors")
    for weights in (tmp_path, tmp_path / "model.safetensors"):
        state = make_experiment(str(weights)).model.state_dict()
        assert all(torch.equal(state[name], t) for name, t in expected.items())


def test_weights_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="weights must be a .safetensors file, or .* of a run .*cannot be read"):
        make_experiment(str(tmp_path))
    (tmp_path / "bad.safetensors").write_bytes(b"nothing of the kind")
    with pytest.raises(ConfigError, match="bad.safetensors cannot be read"):
        make_experiment(str(tmp_path / "bad.safetensors"))
    safetensors.torch.save_file({"x": torch.from_numpy(np.zeros(3))}, tmp_path / "other.safetensors")
    with pytest.raises(ConfigError, match="other.safetensors does not fit the model"):
        make_experiment(str(tmp_path / "other.safetensors"))
