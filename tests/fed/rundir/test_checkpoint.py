"""The run directory: killed and resumed runs end in the same bits; foreign and damaged directories are refused and left
alone."""

import json
import os
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from fastsam import fed
from fastsam.fed.rundir import checkpoint
from fastsam.fed.rundir.checkpoint import RunDirectory, RunState
from fastsam.fed.rundir.environment import float32_precision
from fastsam.fed.rundir.manifest import seal
from fastsam.fed.sums.ranks import Ranks
from tests.helpers import oracle
from tests.helpers.fed_rundir import records, snapshot, start
from tests.helpers.fed_runs import cross_entropy_until, fail, same_bits


def test_what_a_run_leaves(tmp_path):
    result = start(tmp_path / "a" / "run", config={"name": "mine"})
    directory = result.run_dir
    assert sorted(snapshot(directory)) == [
        "checkpoint/manifest.json", "checkpoint/server-000003.safetensors", "clients.csv", "config.json",
        "environment.json", "metrics.jsonl", "model.safetensors", "summary.json",
    ]  # fmt: skip
    assert json.loads((directory / "config.json").read_text()) == {"name": "mine"}
    assert json.loads((directory / "summary.json").read_text()) == result.summary()
    assert [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()] == result.history
    assert "torch" in json.loads((directory / "environment.json").read_text())["packages"]
    fresh = oracle.smooth_model(seed=5)
    fresh.load_state_dict(load_file(directory / "model.safetensors"))
    assert same_bits(fresh, result.model)


def test_the_default_config_says_what_was_run(tmp_path):
    start(tmp_path / "run", algorithm=fed.FedSAM(rho=0.25))
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert (
        config["algorithm"] == "FedSAM"
        and config["algorithm.rho"] == 0.25
        and config["loss"] == "torch.nn.functional.cross_entropy"
    )


@pytest.mark.parametrize("interval", [1, 2, 5])
def test_rounds_in_parts_are_the_rounds_in_one_piece(tmp_path, interval):
    full_run = start(tmp_path / "whole", rounds=5)
    for rounds in (1, 2, 4, 5, 5):
        parts = start(tmp_path / "parts", rounds=rounds, resume=True, checkpoint_every=interval)
    assert same_bits(full_run.model, parts.model) and records(tmp_path / "whole") == records(tmp_path / "parts")
    files = [tmp_path / name / "model.safetensors" for name in ("whole", "parts")]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_the_start_is_in_the_checkpoint(tmp_path):
    """Resuming needs only the model's structure, so a model built without a seed will do."""
    full_run = start(tmp_path / "whole", rounds=4)
    start(tmp_path / "parts", rounds=2)
    other_model = oracle.smooth_model(seed=77)
    assert same_bits(full_run.model, start(tmp_path / "parts", rounds=4, resume=True, model=other_model).model)


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("place", ["loss", "progress"])
def test_whatever_ends_a_run_early_leaves_the_last_completed_round(tmp_path, error, place):
    full_run = start(tmp_path / "whole", executor="sequential", rounds=5)
    loss = cross_entropy_until(25 if place == "loss" else 0, lambda: fail(error("stop")))  # in the middle of a round

    def progress(record):
        if place == "progress" and record["round"] == 3:
            raise error("stop")

    with pytest.raises((error, fed.ClientError), match="stop"):
        start(tmp_path / "run", executor="sequential", rounds=5, checkpoint_every=100, loss=loss, progress=progress)
    completed_rounds = json.loads((tmp_path / "run" / "checkpoint" / "manifest.json").read_text())["round"]
    assert completed_rounds == len(records(tmp_path / "run")) and 0 < completed_rounds < 5
    resumed_result = start(tmp_path / "run", executor="sequential", rounds=5, resume=True)
    assert same_bits(full_run.model, resumed_result.model) and records(tmp_path / "whole") == records(tmp_path / "run")


def test_interrupted_while_a_record_is_written(tmp_path, monkeypatch, caplog):
    full_run = start(tmp_path / "whole", rounds=5)
    log = RunDirectory.log

    def half(self, record):
        if record["round"] == 3:
            (self.path / "metrics.jsonl").open("a").write('{"round": 3, "lr"')
            raise KeyboardInterrupt
        log(self, record)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(RunDirectory, "log", half)
        start(tmp_path / "run", rounds=5, checkpoint_every=2)
    assert "changed from outside" not in caplog.text
    assert [r["round"] for r in records(tmp_path / "run")] == [1, 2, 3]
    resumed_result = start(tmp_path / "run", rounds=5, checkpoint_every=2, resume=True)
    assert same_bits(full_run.model, resumed_result.model) and records(tmp_path / "whole") == records(tmp_path / "run")


def test_an_existing_run_is_refused(tmp_path):
    start(tmp_path / "run")
    old_snapshot = snapshot(tmp_path / "run")
    with pytest.raises(fed.RunDirectoryError, match="exists and is not empty.*resume=True"):
        start(tmp_path / "run")
    assert snapshot(tmp_path / "run") == old_snapshot


def test_resume_starts_where_there_is_nothing(tmp_path):
    (tmp_path / "empty").mkdir()
    runs = (("empty", True), ("new", True), ("other", False))
    a, b, c = (start(tmp_path / name, resume=resume) for name, resume in runs)
    assert same_bits(a.model, b.model) and same_bits(a.model, c.model)


@pytest.mark.parametrize("resume", [False, True])
def test_a_directory_with_other_files_is_refused(tmp_path, resume):
    (tmp_path / "thesis.tex").write_text("important")
    with pytest.raises(fed.RunDirectoryError, match="thesis.tex|not empty"):
        start(tmp_path, resume=resume)
    (tmp_path / "file").write_text("x")
    with pytest.raises(fed.RunDirectoryError, match="is a file"):
        start(tmp_path / "file", resume=resume)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "thesis.tex"]


def other_clients():
    changes = oracle.ragged_clients()
    changes[1][0][0, 0] += 1e-12
    return changes


def wider():
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3)).double()


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"algorithm": fed.FedSAM()}, "algorithm"), ({"algorithm": fed.MoFedSAM(beta=0.2)}, r"algorithm\.beta"),
        ({"algorithm": fed.MoFedSAM(rho="0.3/round")}, r"algorithm\.rho"), ({"seed": 1}, "seed"), ({"lr": 0.2}, "lr"),
        ({"batch_size": 4}, "batch_size"), ({"weighting": "samples"}, "weighting"),
        ({"aggregation": "median"}, "aggregation"), ({"local_parameters": "2.*"}, "local_parameters"),
        ({"clip_norm": 10.0}, "clip_norm"), ({"sampler": lambda t, g: [0]}, "sampler"),
        ({"sampler": "bernoulli"}, "sampler"), ({"loss": F.nll_loss}, "loss"),
        ({"clients": other_clients()}, "data"), ({"test": oracle.ragged_clients(sizes=(8,))[0]}, "data"),
        ({"model": wider()}, "model"), ({"executor": "vmap", "slots": 2}, "numbers"),
        ({"backend": "reference"}, "backend"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)  # fmt: skip
def test_another_run_is_not_continued(tmp_path, change, key):
    start(tmp_path / "run", rounds=1)
    old_snapshot = snapshot(tmp_path / "run")
    with pytest.raises(fed.RunDirectoryError, match=rf"another {key}: it was started with") as messages:
        start(tmp_path / "run", rounds=2, resume=True, **change)
    meanings = {"data": "hashes of all clients' samples", "numbers": "executor, slots and the number of ranks"}
    assert meanings.get(key, "") in str(messages.value)
    assert snapshot(tmp_path / "run") == old_snapshot


def test_fewer_rounds_than_done(tmp_path):
    start(tmp_path / "run", rounds=3)
    old_snapshot = snapshot(tmp_path / "run")
    with pytest.raises(ValueError, match="rounds must be 3 or more.*got 2"):
        start(tmp_path / "run", rounds=2, resume=True)
    assert snapshot(tmp_path / "run") == old_snapshot


def test_another_precision_of_float32_is_recorded_and_warned_of_at_resume(tmp_path, caplog):
    start(tmp_path / "run", rounds=1)
    recorded = json.loads((tmp_path / "run" / "environment.json").read_text())["float32_precision"]
    assert recorded == dict.fromkeys(("mkldnn.matmul", "mkldnn.conv", "mkldnn.rnn"), "ieee")
    try:
        torch.set_float32_matmul_precision("highest")  # is the default, spelled out
        start(tmp_path / "run", rounds=2, resume=True)
        assert "float32_precision" not in caplog.text
        torch.set_float32_matmul_precision("medium")
        start(tmp_path / "run", rounds=3, resume=True)
    finally:
        torch.set_float32_matmul_precision("highest")
    assert "began with another float32_precision.mkldnn.matmul: ieee; it goes on with bf16" in caplog.text
    cuda = float32_precision(torch.device("cuda", 0))
    assert list(cuda) == ["cuda.matmul", "cudnn.conv", "cudnn.rnn"] and {*cuda.values()} <= {"ieee", "tf32"}


def damage(path, mode):
    data = path.read_bytes()
    if mode == "gone":
        path.unlink()
    else:
        path.write_bytes(
            {
                "cut": data[: len(data) // 2],
                "empty": b"",
                "flipped": data[:-1] + bytes([data[-1] ^ 1]),
                "foreign": b'{"a": 1}',
            }[mode]
        )


@pytest.mark.parametrize("mode", ["gone", "cut", "empty", "flipped", "foreign"])
@pytest.mark.parametrize("file", ["checkpoint/manifest.json", "checkpoint/server-000003.safetensors", "metrics.jsonl"])
def test_a_damaged_run_is_refused_and_left_alone(tmp_path, file, mode):
    start(tmp_path / "run", rounds=3)
    damage(tmp_path / "run" / file, mode)
    old_snapshot = snapshot(tmp_path / "run")
    with pytest.raises(fed.RunDirectoryError, match=Path(file).name.split("-")[0] + "|holds no checkpoint"):
        start(tmp_path / "run", rounds=4, resume=True)
    assert snapshot(tmp_path / "run") == old_snapshot


@pytest.mark.parametrize(
    "wrong_content",
    [{"version": 99}, {"clients": 3}, {"files": {}}, {"identity": None}, {"round": None}, {"server": "no"}],
)
def test_a_manifest_with_other_contents(tmp_path, wrong_content):
    start(tmp_path / "run", rounds=2)
    manifest = tmp_path / "run" / "checkpoint" / "manifest.json"
    manifest.write_text(json.dumps(seal(json.loads(manifest.read_text()) | wrong_content)))
    with pytest.raises(fed.RunDirectoryError):
        start(tmp_path / "run", rounds=4, resume=True)


@pytest.mark.parametrize("mode", ["gone", "cut", "empty", "flipped", "foreign"])
def test_records_damaged_in_mid_run_are_written_anew(tmp_path, mode, caplog):
    path = tmp_path / "run" / "metrics.jsonl"

    def progress(record):
        if record["round"] == 3:
            damage(path, mode)

    full_run = start(tmp_path / "run", rounds=4, progress=progress)
    assert [json.loads(line) for line in path.read_text().splitlines()] == full_run.history
    assert "metrics.jsonl was removed or changed from outside" in caplog.text
    start(tmp_path / "run", rounds=5, resume=True)


def test_a_checkpoint_names_no_file_outside(tmp_path):
    start(tmp_path / "run", rounds=2)
    manifest = tmp_path / "run" / "checkpoint" / "manifest.json"
    content = json.loads(manifest.read_text())
    (tmp_path / "outside").write_bytes((manifest.parent / content["server"]).read_bytes())
    content["files"] = {"../../outside": content["files"].pop(content["server"])}
    content["server"] = "../../outside"
    manifest.write_text(json.dumps(seal(content)))
    with pytest.raises(fed.RunDirectoryError, match="outside"):
        start(tmp_path / "run", rounds=4, resume=True)


def test_one_of_several_ranks_rescues_nothing(tmp_path):
    """A checkpoint needs all ranks, and other ranks may have failed, so the last checkpoint is kept."""
    device = torch.device("cpu")
    state = RunState(3, {"w": torch.zeros(4)}, [], {}, [{"round": i} for i in (1, 2, 3)])
    for size in (1, 2):
        path = tmp_path / f"{size}"
        (path / "checkpoint").mkdir(parents=True)
        directory = RunDirectory(path, {}, device, Ranks(0, size), lambda t: t, ExitStack())
        directory.read(resume=True)
        directory.saved_round = 2
        directory.rescue(state)
        assert (path / "metrics.jsonl").exists() == (path / "checkpoint" / "manifest.json").exists() == (size == 1)


@pytest.mark.parametrize("time", ["written", "synchronised"])
def test_a_disk_that_is_full_for_the_records_is_told_with_their_name(tmp_path, monkeypatch, time):
    open_regular, fsync = checkpoint.open_regular, os.fsync

    def full(path, flags):
        appends = time == "written" and flags & os.O_APPEND
        return os.open("/dev/full", os.O_WRONLY) if appends else open_regular(path, flags)

    def full_at_the_end(descriptor):
        if time == "synchronised" and os.readlink(f"/proc/self/fd/{descriptor}").endswith("metrics.jsonl"):
            raise OSError(28, "No space left on device")
        fsync(descriptor)

    monkeypatch.setattr(checkpoint, "open_regular", full)
    monkeypatch.setattr(os, "fsync", full_at_the_end)
    with pytest.raises(OSError, match=r"No space left on device: '.*/run/metrics.jsonl'"):
        start(tmp_path / "run")
