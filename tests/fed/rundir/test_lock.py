"""One run at a time in a run directory."""

from __future__ import annotations

import pytest
import torch

from fastsam import fed
from fastsam.fed.rundir.checkpoint import RunDirectory, RunState
from fastsam.fed.rundir.lock import Lock
from fastsam.fed.sums.ranks import Ranks
from tests.helpers.fed_rundir import records, start


def test_two_runs_in_one_directory(tmp_path):
    """The second is refused while the first one works, whether it resumes or began at the same instant; afterwards it
    may go on."""
    told = []

    def second(record):
        with pytest.raises(fed.RunDirectoryError) as caught:
            start(tmp_path / "run", resume=True)
        told.append(str(caught.value))

    start(tmp_path / "run", rounds=2, progress=second)
    assert (
        told
        == [f"another run is working in {tmp_path / 'run'}; wait until it has ended, or choose another run_dir"] * 2
    )
    assert len(records(tmp_path / "run")) == 2
    start(tmp_path / "run", resume=True)
    start(tmp_path / "whole")
    assert records(tmp_path / "run") == records(tmp_path / "whole")


def test_two_runs_that_begin_at_once(tmp_path):
    """Both have found no directory; one of them makes it."""
    opened = [
        RunDirectory.open(tmp_path / "run", False, {}, torch.device("cpu"), Ranks(), lambda t: t, Lock()) for _ in "12"
    ]
    state = RunState(0, {"w": torch.zeros(4)}, [])
    opened[0][0].start(state, {}, {})
    with pytest.raises(fed.RunDirectoryError, match="another run is working in"):
        opened[1][0].start(state, {}, {})
    with opened[0][0].lock:
        pass
    with pytest.raises(fed.RunDirectoryError, match="another run has just begun in"):
        opened[1][0].start(state, {}, {})


def test_an_error_leaves_no_lock(tmp_path):
    """Also while somebody holds the traceback, as a notebook does."""

    def stop(record):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine") as caught:
        start(tmp_path / "run", progress=stop)
    assert start(tmp_path / "run", resume=True).summary()["rounds"] == 3 and caught.value.args == ("mine",)


def test_a_file_system_without_locks(tmp_path, monkeypatch, caplog):
    def unsupported(*arguments):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("fcntl.flock", unsupported)
    start(tmp_path / "run")
    assert f"{tmp_path / 'run'} cannot be locked (Operation not supported)" in caplog.text
