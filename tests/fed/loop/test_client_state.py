"""Client states in host memory and on the device: the same bits, a bounded number on the device, copies in order.
Without a GPU: a stand-in."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from pytest import MonkeyPatch
from safetensors import safe_open

from fastsam import fed
from fastsam.arena import Layout
from fastsam.fed.loop import client_state
from fastsam.fed.rundir.manifest import seal
from tests.helpers import oracle
from tests.helpers.fake_cuda import Watch
from tests.helpers.fed_ranks import ALGORITHMS, SIZES
from tests.helpers.fed_runs import digest
from tests.helpers.fed_states import CPU, stand_in, train

CASES = ALGORITHMS | {"fedlesam-s": fed.FedLESAM_S(rho=0.05)}
every_other_case = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if i % 2 else []) for i, name in enumerate(CASES)]
)


def files(directory: Path) -> dict[str, str]:
    """The hashes of the tensors on disk, by file."""
    digests = {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in directory.glob("checkpoint/*.safetensors")}
    assert any(name.startswith("clients-") for name in digests)
    return digests


# --- the setting ---


@pytest.mark.parametrize("where", client_state.CHOICES)
def test_on_the_cpu_the_setting_changes_nothing(where: str) -> None:
    result = train(fed.SCAFFOLD(), client_state=where, rounds=3)
    assert digest(result) == digest(train(fed.SCAFFOLD(), rounds=3))
    assert result.summary()["client_state"] == "device"


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(("megabytes", "where"), [(0.1, "device"), (0.25, "device"), (0.26, "host")])
def test_auto_is_a_rule_on_the_share_of_the_devices_memory(megabytes: float, where: str) -> None:
    storage = client_state.make("auto", CPU, megabytes * 1e6, 1)
    assert storage.location == where and f"take {megabytes:.3g} of the device's memory" in storage.reason
    for choice in ("host", "device"):
        assert client_state.make(choice, CPU, megabytes * 1e6, 1).location == choice


@pytest.mark.parametrize(("device", "location"), [("cpu", "auto"), ("cpu", "device"), ("gpu", "auto"), ("gpu", "host")])
def test_states_that_need_more_than_half_of_the_host_warn_with_their_bytes(
    device: str, location: str, monkeypatch: MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if device == "gpu":
        stand_in(monkeypatch)
    monkeypatch.setattr(client_state, "host_memory", lambda: 10**7)
    client_state.make(location, CPU, 5e6, 1)
    assert not caplog.records
    client_state.make(location, CPU, 5.1e6, 1)
    (record,) = caplog.records
    assert "take 5100000 bytes when all have taken part" in record.message and record.levelname == "WARNING"


@pytest.mark.usefixtures("gpu")
def test_states_on_a_device_need_no_memory_of_the_host(
    monkeypatch: MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(client_state, "host_memory", lambda: 10**5)
    client_state.make("device", CPU, 5.1e6, 1)
    assert not caplog.records


@pytest.mark.usefixtures("gpu")
def test_auto_counts_the_states_of_all_clients(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    """It counts the clients' first states."""
    stride = Layout.from_tensors(list(oracle.smooth_model(torch.float32).parameters())).row_size
    for algorithm, vectors in ((fed.SCAFFOLD(), 1), (fed.FedSMOO(), 2), (fed.FedSAM(), 0)):
        for num_less, where in ((0, "device"), (1, "host")):
            total = 4 * 4 * stride * max(vectors, 1) * len(SIZES) - num_less
            monkeypatch.setattr(client_state, "total_memory", lambda device, total=total: total)
            run_dir = tmp_path / f"{type(algorithm).__name__}-{where}"
            result = train(algorithm, rounds=1, run_dir=run_dir)
            expected = where if vectors else "device"
            assert result.summary()["client_state"] == expected
            entry = json.loads((run_dir / "environment.json").read_text())["client_state"]
            assert entry["where"] == expected and "of the device's memory" in entry["reason"]


# --- the same bits, the same files ---


@pytest.mark.usefixtures("gpu")
@every_other_case
def test_the_same_bits_and_files_in_host_memory(name: str, tmp_path: Path) -> None:
    """Also when a run goes on with another setting."""
    where = "host"
    on_device = train(CASES[name], client_state="device", run_dir=tmp_path / "device", checkpoint_every=4)
    for rounds, location in ((2, where), (3, "device"), (5, where), (6, where)):
        options = {"rounds": rounds, "checkpoint_every": 4, "run_dir": tmp_path / "mixed", "resume": True}
        mixed_result = train(CASES[name], client_state=location, **options)
    other_result = train(CASES[name], client_state=where, run_dir=tmp_path / where, checkpoint_every=4)
    assert digest(other_result) == digest(mixed_result) == digest(on_device)
    if name != "fedsam":
        assert files(tmp_path / where) == files(tmp_path / "device")
    assert len({made.summary()["state_megabytes"] for made in (other_result, mixed_result, on_device)}) == 1


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("where", ["host", "device"])
@pytest.mark.parametrize(("executor", "slots"), [("sequential", None), ("streams", 3), ("graph", 2), ("threads", 2)])
def test_with_every_executor(where: str, executor: str, slots: int | None) -> None:
    plain = digest(train(fed.SCAFFOLD(), rounds=3))
    assert digest(train(fed.SCAFFOLD(), rounds=3, executor=executor, slots=slots, client_state=where)) == plain


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("name", "executor", "slots"),
    [
        ("scaffold", "streams", 2),
        ("fedsmoo", "sequential", None),
        *(pytest.param(name, "streams", 2, marks=pytest.mark.slow) for name in ("fedsmoo", "fedlesam-s")),
    ],
)
def test_copies_are_ordered_with_the_work_that_they_are_for(
    name: str, executor: str, slots: int | None, tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    """Streams, and the host that writes a checkpoint, access a storage only after a wait."""
    monkeypatch.setattr(
        client_state, "_MIN_PREFETCHED", 1
    )  # copies are awaited within a round, and not only at its end
    options = {"backend": "reference", "rounds": 3, "sizes": (7, 10, 1, 6, 5, 3), "participation": 0.7}
    plain = digest(train(CASES[name], **options))
    with Watch():
        options |= {"executor": executor, "slots": slots, "run_dir": tmp_path / "run"}
        result = train(CASES[name], client_state="host", **options)
    assert digest(result) == plain


# --- a round that is left in the middle ---


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("interrupted_step", [1, 4, 7])
def test_a_round_that_is_left_in_the_middle_leaves_the_one_before(interrupted_step: int, tmp_path: Path) -> None:
    """The states on disk belong to the last complete round, and the resumed run has the same bits."""

    @dataclass(frozen=True)
    class Interrupted(fed.SCAFFOLD):
        def finish(self, server: Any, client: Any, results: Any, round: Any) -> Any:
            closed_clients.extend(results.client_ids)
            if (
                round.index == 3
                and closed_clients.count(results.client_ids[0]) == 4
                and len(closed_clients) == 3 * len(SIZES) + interrupted_step
            ):
                raise KeyboardInterrupt
            return super().finish(server, client, results, round)

    options = {"participation": 1.0, "client_state": "host", "checkpoint_every": 2}
    whole = train(fed.SCAFFOLD(), **options, run_dir=tmp_path / "whole")
    train(fed.SCAFFOLD(), **options | {"rounds": 3, "checkpoint_every": 3}, run_dir=tmp_path / "three")
    closed_clients: list[int] = []
    with pytest.raises(KeyboardInterrupt):
        train(Interrupted(), **options, run_dir=tmp_path / "left")
    assert tensors(tmp_path / "left") == tensors(tmp_path / "three")
    manifest = tmp_path / "left" / "checkpoint" / "manifest.json"
    manifest.write_text(json.dumps(seal(json.loads(manifest.read_text().replace("Interrupted", "SCAFFOLD")))))
    assert digest(train(fed.SCAFFOLD(), **options, run_dir=tmp_path / "left", resume=True)) == digest(whole)


def tensors(directory: Path) -> dict[str, list[float]]:
    """Return the values in the files of client states, by client."""
    manifest = json.loads((directory / "checkpoint" / "manifest.json").read_text())
    tensors_by_name = {}
    for client, name in manifest["clients"].items():
        with safe_open(directory / "checkpoint" / name, "pt") as file:
            places = json.loads(file.metadata()["places"])[client]
            tensors_by_name[client] = [file.get_tensor(key).tolist() for key in places.values()]
    return tensors_by_name


# --- on a GPU ---


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("executor", "slots"), [("sequential", None), ("streams", 3), ("graph", 3)])
def test_on_a_gpu_bits_do_not_depend_on_the_store(name: str, executor: str, slots: int | None, tmp_path: Path) -> None:
    digests = set()
    for where in ("device", "host"):
        options = {"device": "cuda", "executor": executor, "slots": slots, "client_state": where}
        digests.add(digest(train(CASES[name], run_dir=tmp_path / where, **options)))
        half = {"run_dir": tmp_path / f"{where}-resumed", "rounds": 3}
        train(CASES[name], **options | half)
        digests.add(digest(train(CASES[name], **options, run_dir=half["run_dir"], resume=True)))
    assert len(digests) == 1
    if name != "fedsam":
        assert files(tmp_path / "host") == files(tmp_path / "device")
