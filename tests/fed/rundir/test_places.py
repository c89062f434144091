"""Foreign files in a run directory: they are not followed, deleted or waited for, and are noticed before a run
starts."""

import json
import os
import shutil
import sys
from contextlib import ExitStack

import pytest
import torch
from torch import nn

from fastsam import fed
from fastsam.fed.common.atomic_files import write_bytes
from fastsam.fed.rundir.checkpoint import RunDirectory, RunState
from fastsam.fed.sums.ranks import Ranks
from tests.helpers.fed_rundir import records, snapshot, start


def test_a_link_beside_a_file_is_not_followed(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / "a.json.tmp").symlink_to(victim)
    (tmp_path / "b.json").symlink_to(victim)
    write_bytes(tmp_path / "a.json", b"new")
    write_bytes(tmp_path / "b.json", b"new")
    assert victim.read_text() == "precious" and not (tmp_path / "b.json").is_symlink()
    assert (tmp_path / "a.json").read_bytes() == b"new" and not (tmp_path / "a.json.tmp").exists()


def test_a_run_writes_through_no_link(tmp_path):
    start(tmp_path / "run", rounds=1)
    victim = tmp_path / "victim"
    victim.write_text("precious")
    for name in (
        "config.json",
        "model.safetensors",
        "checkpoint/manifest.json",
        "checkpoint/server-000002.safetensors",
    ):
        (tmp_path / "run" / f"{name}.tmp").symlink_to(victim)
    start(tmp_path / "run", rounds=2, resume=True)
    assert victim.read_text() == "precious"


def test_what_the_user_keeps_in_the_checkpoint_stays(tmp_path):
    start(tmp_path / "run", rounds=1)
    folder = tmp_path / "run" / "checkpoint"
    own_files = ["best.safetensors", "server.safetensors", "server-best.safetensors", "clients-000001.safetensors.bak"]
    for name in own_files:
        (folder / name).write_text("mine")
    (folder / "server-000000.safetensors").write_text("left by a kill")
    start(tmp_path / "run", rounds=2, resume=True)
    assert sorted(p.name for p in folder.iterdir()) == sorted(
        [*own_files, "manifest.json", "server-000002.safetensors"]
    )


@pytest.mark.parametrize("name", ["checkpoint/manifest.json", "checkpoint/server-000001.safetensors", "metrics.jsonl"])
def test_a_pipe_is_refused_instead_of_waited_for(tmp_path, name):
    start(tmp_path / "run", rounds=1)
    path = tmp_path / "run" / name
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(fed.RunDirectoryError, match=r"not a regular file"):
        start(tmp_path / "run", rounds=2, resume=True)


@pytest.mark.parametrize("name", ["summary.json", "model.safetensors", "metrics.jsonl", "config.json", "clients.csv"])
@pytest.mark.parametrize("kind", ["directory", "link"])
def test_a_file_that_cannot_be_written_is_told_before_the_training(tmp_path, name, kind):
    start(tmp_path / "run", rounds=1)
    path = tmp_path / "run" / name
    path.unlink()
    if kind == "directory":
        path.mkdir()
    else:
        path.symlink_to(tmp_path / "elsewhere")
    old_snapshot = snapshot(tmp_path / "run")
    with pytest.raises(fed.RunDirectoryError, match=rf"{name} is not a regular file.*choose another run_dir"):
        start(tmp_path / "run", rounds=2, resume=True)
    assert snapshot(tmp_path / "run") == old_snapshot and not (tmp_path / "elsewhere").exists()


def test_a_relative_directory_is_that_of_the_start(tmp_path, monkeypatch):
    (tmp_path / "a").mkdir()
    monkeypatch.chdir(tmp_path / "a")
    result = start("run", rounds=2, progress=lambda record: os.chdir(tmp_path))
    assert result.run_dir == tmp_path / "a" / "run" and not (tmp_path / "run").exists()
    assert len((result.run_dir / "metrics.jsonl").read_text().splitlines()) == 2
    assert json.loads((result.run_dir / "summary.json").read_text())["rounds"] == 2


@pytest.mark.parametrize("resume", [False, True])
def test_a_link_in_place_of_the_checkpoints_folder_is_not_followed(tmp_path, resume):
    victim = tmp_path / "victim"
    victim.mkdir()
    start(tmp_path / "run", rounds=1)
    if resume:
        (tmp_path / "run" / "checkpoint").rename(tmp_path / "theirs")
        for path in (tmp_path / "theirs").iterdir():
            (victim / path.name).write_bytes(path.read_bytes())
    else:
        shutil.rmtree(tmp_path / "run" / "checkpoint")
    (tmp_path / "run" / "checkpoint").symlink_to(victim)
    (victim / "server-000000.safetensors").write_text("precious")
    old_snapshot = snapshot(victim)
    with pytest.raises(fed.RunDirectoryError, match=r"checkpoint is a link or a file.*choose another run_dir"):
        start(tmp_path / "run", rounds=2, resume=True)
    assert snapshot(victim) == old_snapshot


def test_a_link_that_appears_during_a_run_is_not_followed(tmp_path):
    victim = tmp_path / "victim"
    victim.mkdir()
    folder = tmp_path / "run" / "checkpoint"

    def replace(record):
        if record["round"] == 1:
            folder.rename(tmp_path / "old")
            folder.symlink_to(victim)

    with pytest.raises(OSError, match="checkpoint"):
        start(tmp_path / "run", rounds=3, checkpoint_every=1, progress=replace)
    assert not list(victim.iterdir())


# --- What a run returns.


def test_a_data_frame_needs_pandas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match=r"to_pandas\(\) needs pandas .pip install pandas.; .* in .history"):
        fed.Result(nn.Linear(1, 1), [{"round": 1}], {}, None, None).to_pandas()


# --- One run at a time in a run directory.


def test_two_runs_in_one_directory(tmp_path):
    """The second is refused while the first one works, whether it resumes or began at the same instant; afterwards it
    may go on."""
    messages = []

    def second(record):
        with pytest.raises(fed.RunDirectoryError) as error_info:
            start(tmp_path / "run", resume=True)
        messages.append(str(error_info.value))

    start(tmp_path / "run", rounds=2, progress=second)
    words = f"another run is working in {tmp_path / 'run'}; wait until it has ended, or choose another run_dir"
    assert messages == [words] * 2
    assert len(records(tmp_path / "run")) == 2
    start(tmp_path / "run", resume=True)
    start(tmp_path / "whole")
    assert records(tmp_path / "run") == records(tmp_path / "whole")


def test_two_runs_that_begin_at_once(tmp_path):
    """Both have found no directory; one of them makes it."""
    directories = [
        RunDirectory(tmp_path / "run", {}, torch.device("cpu"), Ranks(), lambda t: t, ExitStack()) for _ in "123"
    ]
    assert [reader.read(resume=False) for reader in directories[:2]] == [None, None]
    state = RunState(0, {"w": torch.zeros(4)}, [])
    directories[0].start(state, {}, {})
    with pytest.raises(fed.RunDirectoryError, match="another run is working in"):
        directories[1].start(state, {}, {})
    with pytest.raises(fed.RunDirectoryError, match="another run is working in"):
        directories[2].read(resume=True)  # not while the other one writes
    with directories[0]._stack:
        pass
    with pytest.raises(fed.RunDirectoryError, match="another run has just begun in"):
        directories[1].start(state, {}, {})


def test_an_error_leaves_no_lock(tmp_path):
    """A held traceback, as a notebook holds one, does not keep the lock."""

    def stop(record):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine") as error_info:
        start(tmp_path / "run", progress=stop)
    assert start(tmp_path / "run", resume=True).summary()["rounds"] == 3 and error_info.value.args == ("mine",)


def test_a_file_system_without_locks(tmp_path, monkeypatch, caplog):
    def refuse_lock(*arguments):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("fcntl.flock", refuse_lock)
    start(tmp_path / "run")
    assert f"{tmp_path / 'run'} cannot be locked (Operation not supported)" in caplog.text
