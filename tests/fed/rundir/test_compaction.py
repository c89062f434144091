"""States of clients that are absent for long do not keep old states of other clients on the disk."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn

from fastsam import fed
from fastsam.fed.rundir.checkpoint import RunDirectory
from fastsam.fed.rundir.holdings import Holdings
from tests.helpers import oracle
from tests.helpers.fed_input import start as start_small
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
    whole = live = 0
    for file in folder.glob("clients-*.safetensors"):
        header = file.read_bytes()
        places = json.loads(json.loads(header[8 : 8 + int.from_bytes(header[:8], "little")])["__metadata__"]["places"])
        tensors = load_file(file)
        own = {key for i, state in places.items() if manifest["clients"].get(i) == file.name for key in state.values()}
        whole += sum(t.nbytes for t in tensors.values())
        live += sum(tensors[key].nbytes for key in own)
    return whole, live


@pytest.mark.parametrize("algorithm", [fed.FedDyn(), fed.FedLESAM(rho=0.1)], ids=lambda made: type(made).__name__)
def test_files_hold_at_most_twice_what_lives(tmp_path: Path, algorithm: fed.Algorithm) -> None:
    for rounds in (4, 9, 14, 19):
        start(tmp_path / "run", algorithm, rounds, resume=True)
        whole, live = on_disk(tmp_path / "run")
        assert 0 < live <= whole <= 2 * live


def test_a_run_whose_states_moved_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    """Clients that were absent for many rounds take part in the end."""

    def back(round: int, generator: torch.Generator) -> list[int]:
        return cohort(round, generator) if round < 12 else list(range(12))

    clients = oracle.ragged_clients(sizes=[3] * (OFTEN[-1] + 1))

    def go(directory: Path, rounds: int, **options: Any) -> fed.Result:
        options |= {"rounds": rounds, "sampler": back, "run_dir": directory}
        return fed.run(oracle.smooth_model(), clients, fed.FedDyn(), **options)

    whole = go(tmp_path / "whole", 14)
    for rounds in (5, 12, 13, 14):
        parts = go(tmp_path / "parts", rounds, resume=True)
    assert same_bits(whole.model, parts.model)
    assert records(tmp_path / "whole") == records(tmp_path / "parts")


def test_a_disk_that_was_full_does_not_leave_old_states_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rest of a file that could not be moved is moved the next time."""
    write, failed = RunDirectory._write, []

    def full(self: RunDirectory, name: str, *rest: Any) -> str:
        if name == "clients-000006.safetensors" and not failed:
            failed.append(name)
            raise OSError(28, "No space left on device", name)
        return write(self, name, *rest)

    monkeypatch.setattr(RunDirectory, "_write", full)
    with pytest.raises(OSError, match="No space"):
        start(tmp_path / "run", fed.FedDyn(), 9)
    assert failed
    start(tmp_path / "run", fed.FedDyn(), 9, resume=True)
    whole, live = on_disk(tmp_path / "run")
    assert 0 < live <= whole <= 2 * live


# --- What lives in the files of clients' states, counted as it changes: as a count of everything says.


@pytest.mark.parametrize("seed", range(5))
def test_counts_are_those_of_everything_counted_anew(seed: int) -> None:
    rng, holdings = random.Random(seed), Holdings()
    files: dict[str, int] = {}
    clients: dict[int, tuple[dict[str, torch.Tensor], str]] = {}
    for step in range(60):
        file, shared = f"file {step}", torch.zeros(7)
        chosen = rng.sample(range(20), rng.randint(1, 6))
        states = {i: {"own": torch.zeros(rng.randint(1, 9)), "shared": shared, "again": shared} for i in chosen}
        files[file] = sum(s["own"].nbytes for s in states.values()) + shared.nbytes
        holdings.add_file(file, files[file])
        for i, state in states.items():
            if i in clients:
                holdings.drop(clients[i][1], clients[i][0])
            clients[i] = state, file
            holdings.add(file, state)
        if rng.random() < 0.3:
            gone = rng.choice(list(clients))
            holdings.drop(clients[gone][1], clients.pop(gone)[0])
        live: dict[str, dict[int, int]] = {}
        for state, name in clients.values():
            live.setdefault(name, {}).update((id(t), t.nbytes) for t in state.values())
        wanted = {name for name, own in live.items() if sum(own.values()) < 0.5 * files[name]}
        if rng.random() < 0.7:
            assert holdings.sparse() == wanted
    assert wanted, "some file must have become sparse"


# --- A resumed run with another function, or another model, of the same name is warned of, with what differs.


def loss_of(kind: str, weight: float) -> Callable[..., Any]:
    if kind == "plain":

        def loss(outputs, y):
            return weight * F.cross_entropy(outputs, y)
    else:

        def loss(outputs, y):
            return weight * F.cross_entropy(outputs.double(), y)

    return loss


def model_of(activation: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 4), activation(), nn.Linear(4, 3))


PLAIN: dict[str, Any] = {"loss": loss_of("plain", 1.0), "model": model_of(nn.ReLU)}


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"loss": loss_of("plain", 1.0), "model": model_of(nn.ReLU)}, None),
        ({"loss": loss_of("plain", 0.5)}, "began with another loss.weight: 1.0; it goes on with 0.5"),
        ({"loss": loss_of("double", 1.0)}, "began with another loss.code"),
        ({"model": model_of(nn.Tanh)}, "began with another model.repr"),
    ],
    ids=["the same", "closure", "code", "activation"],
)
def test_another_function_of_the_same_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, other: dict[str, Any], words: str | None
) -> None:
    run_dir = tmp_path / "run"
    start_small(**PLAIN, run_dir=run_dir)
    result = start_small(**{**PLAIN, **other}, run_dir=run_dir, resume=True, rounds=2)
    assert isinstance(result, fed.Result)
    assert (words is None and "began with another" not in caplog.text) or (words is not None and words in caplog.text)
