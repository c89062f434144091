"""States of clients that are absent for long do not keep old states of other clients on the disk."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from fastsam import fed
from fastsam.fed.rundir.checkpoint import RunDirectory
from tests.helpers import oracle
from tests.helpers.fed_rundir import records
from tests.helpers.fed_runs import same_bits

OFTEN = (20, 21, 22, 23)


def cohort(round: int, generator: torch.Generator) -> list[int]:
    """A client that never comes again, and some that always do."""
    return [round, *OFTEN]


def start(directory: Path, algorithm: fed.Algorithm, rounds: int, **options: Any) -> fed.Result:
    clients = oracle.ragged_clients(sizes=[3] * (OFTEN[-1] + 1))
    return fed.run(
        oracle.smooth_model(), clients, algorithm, rounds=rounds, sampler=cohort, run_dir=directory, **options
    )


def on_disk(directory: Path) -> tuple[int, int]:
    """Return the bytes of all tensors in the files of client states, and the bytes of the tensors in use."""
    folder = directory / "checkpoint"
    manifest = json.loads((folder / "manifest.json").read_text())
    total_bytes = live = 0
    for file in folder.glob("clients-*.safetensors"):
        header = file.read_bytes()
        places = json.loads(json.loads(header[8 : 8 + int.from_bytes(header[:8], "little")])["__metadata__"]["places"])
        tensors = load_file(file)
        live_keys = {
            key for i, state in places.items() if manifest["clients"].get(i) == file.name for key in state.values()
        }
        total_bytes += sum(t.nbytes for t in tensors.values())
        live += sum(tensors[key].nbytes for key in live_keys)
    return total_bytes, live


@pytest.mark.parametrize("algorithm", [fed.FedDyn(), fed.FedLESAM(rho=0.1)], ids=lambda make: type(make).__name__)
def test_files_hold_at_most_twice_what_lives(tmp_path: Path, algorithm: fed.Algorithm) -> None:
    for rounds in range(1, 20):
        start(tmp_path / "run", algorithm, rounds, resume=True)
        total_bytes, live = on_disk(tmp_path / "run")
        assert 0 < live <= total_bytes <= 2 * live


def test_a_run_whose_states_moved_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    """Clients that were absent for many rounds take part in the end."""

    def sample_back(round: int, generator: torch.Generator) -> list[int]:
        return cohort(round, generator) if round < 12 else list(range(12))

    clients = oracle.ragged_clients(sizes=[3] * (OFTEN[-1] + 1))

    def go(directory: Path, rounds: int, **options: Any) -> fed.Result:
        options |= {"rounds": rounds, "sampler": sample_back, "run_dir": directory}
        return fed.run(oracle.smooth_model(), clients, fed.FedDyn(), **options)

    full_run = go(tmp_path / "whole", 14)
    for rounds in (5, 12, 13, 14):
        parts = go(tmp_path / "parts", rounds, resume=True)
    assert same_bits(full_run.model, parts.model)
    assert records(tmp_path / "whole") == records(tmp_path / "parts")


def test_a_disk_that_was_full_does_not_leave_old_states_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """States that could not be written anew are written the next time."""
    write, failed_writes = RunDirectory._write, []

    def full(self: RunDirectory, name: str, *rest: Any) -> str:
        if name == "clients-000006.safetensors" and not failed_writes:
            failed_writes.append(name)
            raise OSError(28, "No space left on device", name)
        return write(self, name, *rest)

    monkeypatch.setattr(RunDirectory, "_write", full)
    with pytest.raises(OSError, match="No space"):
        start(tmp_path / "run", fed.FedDyn(), 9)
    assert failed_writes
    start(tmp_path / "run", fed.FedDyn(), 9, resume=True)
    total_bytes, live = on_disk(tmp_path / "run")
    assert 0 < live <= total_bytes <= 2 * live
