"""CIFAR and EMNIST read from small archives in the published formats; archives that are missing, cut or of another data
set."""

import gzip
import json
import pickle
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from pytest import MonkeyPatch

from fastsam.fed.data import AUGMENTS, cifar10, cifar100, emnist
from fastsam.fed.data.archives import ArchiveError
from fastsam.lab import cli
from tests.helpers.small_archives import (
    Hostile,
    cifar_files,
    emnist_files,
    expect_cifar,
    expect_emnist,
    idx,
    serve,
    small_cifar,
    small_emnist,
    torchvision,
)

NAMES = {10: "cifar-10-python.tar.gz", 100: "cifar-100-python.tar.gz"}
FOLDERS = {10: "cifar-10-batches-py", 100: "cifar-100-python"}
LOAD = {10: cifar10, 100: cifar100}
STATISTICS = {
    10: ((0.491, 0.482, 0.447), (0.247, 0.243, 0.262)),
    100: ((0.5071, 0.4867, 0.4408), (0.2675, 0.2565, 0.2761)),
}


def test_torchvision_expects_the_published_files() -> None:
    sets = torchvision()
    assert sets.CIFAR10.tgz_md5 == "c58f30108f718f92721af3b95e74349a"
    assert sets.CIFAR100.tgz_md5 == "eb9058c3a382ffc7106e4002c42a8d85"
    assert sets.EMNIST.md5 == "58c8d27c78d21e728a6bc7b3cc06412e"


@pytest.mark.parametrize("classes", [10, 100])
def test_cifar_in_the_published_format(tmp_path: Path, monkeypatch: MonkeyPatch, classes: int) -> None:
    content = small_cifar(monkeypatch, tmp_path, classes)
    all_indices = [list(range(12 * (len(content) - 1)))]
    data = LOAD[classes](tmp_path, clients=1, split="own", indices=all_indices)
    assert (data.classes, data.in_shape, data.augment) == (classes, (3, 32, 32), AUGMENTS["flip_crop"])
    train = [content[name] for name in content if not name.startswith("test")]
    mean, std = STATISTICS[classes]
    for (x, y), stored_content in ((data[0], train), (data.test, [content[next(reversed(content))]])):
        raw = np.concatenate([part for part, _ in stored_content]).astype(np.float64) / 255
        expected = (raw - np.reshape(mean, (3, 1, 1))) / np.reshape(std, (3, 1, 1))
        assert x.dtype == torch.float32 and np.allclose(x.numpy(), expected, atol=1e-5)
        assert y.tolist() == [v for _, part in stored_content for v in part]


def test_the_folder_that_torchvision_unpacks_is_enough(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    small_cifar(monkeypatch, tmp_path, 10)
    first = cifar10(tmp_path, clients=3)
    assert sorted(p.name for p in tmp_path.iterdir()) == [FOLDERS[10], NAMES[10]]  # nothing else is left
    (tmp_path / NAMES[10]).unlink()
    repeat = cifar10(tmp_path, clients=3)
    pairs = zip([*first, first.test], [*repeat, repeat.test])
    assert all(torch.equal(a, b) for client, other_client in pairs for a, b in zip(client, other_client))
    assert len(torchvision().CIFAR10(tmp_path)) == 60


def test_a_damaged_folder_is_an_error_or_mended_from_the_archive(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    content = small_cifar(monkeypatch, tmp_path, 10)
    cifar10(tmp_path, clients=3)
    batch = tmp_path / FOLDERS[10] / "test_batch"
    batch.write_bytes(pickle.dumps(Hostile()))
    assert cifar10(tmp_path, clients=3).test[1].tolist() == content["test_batch"][1]
    batch.write_bytes(pickle.dumps(Hostile()))
    (tmp_path / NAMES[10]).unlink()
    with pytest.raises(ArchiveError, match=f"{FOLDERS[10]} cannot be read as cifar10 .*corrupted.*{NAMES[10]}"):
        cifar10(tmp_path, clients=3)


def test_a_missing_archive_says_where_it_belongs(tmp_path: Path) -> None:
    torchvision()
    with pytest.raises(FileNotFoundError, match=r"no .*cifar-10-python.tar.gz of cifar10; put .*download=true"):
        cifar10(tmp_path)


@pytest.mark.parametrize("damage", ["cut", "changed", "foreign"])
def test_a_wrong_checksum_is_an_error(tmp_path: Path, monkeypatch: MonkeyPatch, damage: str) -> None:
    small_cifar(monkeypatch, tmp_path, 10)
    path = tmp_path / NAMES[10]
    content = path.read_bytes()
    path.write_bytes({"cut": content[:-40], "changed": content[:-1] + b"?", "foreign": b"PK\x03\x04 a file"}[damage])
    words = f"{path.name} is not the complete file of cifar10 with the MD5 {torchvision().CIFAR10.tgz_md5}. Remove it"
    with pytest.raises(ArchiveError, match=words):
        cifar10(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def pickle_content(**content: object) -> bytes:
    return pickle.dumps(content, protocol=2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"test": None}, "Dataset not found or corrupted"),
        ({"test": pickle_content(data=np.zeros((2, 3072), np.uint8))}, "KeyError: 'fine_labels'"),
        ({"test": pickle_content(data=np.zeros((2, 5), np.uint8), fine_labels=[0, 1])}, "cannot reshape"),
        ({"test": b"not a pickle"}, "UnpicklingError"),
        (
            {"test": pickle_content(data=np.zeros((2, 3072)), fine_labels=[0, 1])},
            r"expected bytes of \[3, 32, 32\].* got float64",
        ),
        (
            {"train": pickle_content(data=np.zeros((2, 3072), np.uint8), fine_labels=[0])},
            r"\[2, 3, 32, 32\] and \[1\] labels",
        ),
        (
            {"train": pickle_content(data=np.zeros((2, 3072), np.uint8), fine_labels=[0, 100])},
            r"training part .* labels in 0\.\.99",
        ),
    ],
)
def test_what_an_archive_holds_is_checked_too(
    tmp_path: Path, monkeypatch: MonkeyPatch, change: dict[str, bytes | None], message: str
) -> None:
    """The archives have the right checksum, but they are damaged or of a different data set."""
    files, _ = cifar_files(100)
    path = expect_cifar(monkeypatch, tmp_path, 100, {k: v for k, v in (files | change).items() if v is not None})
    with pytest.raises(ArchiveError, match=message):
        cifar100(tmp_path, clients=2, split="iid")
    assert path.is_file()


def test_emnist_in_the_published_format(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    content = small_emnist(monkeypatch, tmp_path)
    data = emnist(tmp_path, clients=4, split="iid", fraction=1.0)
    assert (data.classes, data.in_shape, data.augment, data.name) == (62, (1, 28, 28), None, "EMNIST")
    raw = content["train"][0] / 255
    x, y = content["test"]
    expected = (x.transpose(0, 2, 1) / 255 - raw.mean()) / raw.std()  # stored images are transposed
    assert np.allclose(data.test[0][:, 0].numpy(), expected, atol=1e-5) and data.test[1].tolist() == y
    all_images = torch.cat([x for x, _ in data]).double()
    assert all_images.mean().item() == pytest.approx(0, abs=1e-6) and all_images.std(
        correction=0
    ).item() == pytest.approx(1)
    (tmp_path / "EMNIST/raw/gzip.zip").unlink()
    repeat = emnist(tmp_path, clients=4, split="iid", fraction=1.0)
    assert torch.equal(repeat.test[0], data.test[0])
    assert len(torchvision().EMNIST(tmp_path, split="byclass")) == 200


def test_emnist_subset_is_a_fixed_tenth_of_each_part(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    assert (int(0.1 * 697_932), int(0.1 * 116_323)) == (69_793, 11_632)
    small_emnist(monkeypatch, tmp_path)
    a = emnist(tmp_path, clients=4, split="iid")
    b = emnist(tmp_path, clients=2, split="iid", seed=3)
    assert sum(len(y) for _, y in a) == 20 and len(a.test[1]) == 5
    assert torch.equal(a.test[0], b.test[0])
    assert sorted(torch.cat([y for _, y in a]).tolist()) == sorted(torch.cat([y for _, y in b]).tolist())
    with pytest.raises(ValueError, match="of the 50 test images of EMNIST has no image"):
        emnist(tmp_path, fraction=0.01)
    with pytest.raises(ValueError, match="fraction must be a finite number > 0 and <= 1"):
        emnist(tmp_path, fraction=1.5)


def emnist_member(part: str, content: bytes) -> dict[str, bytes]:
    return {f"emnist-byclass-train-{part}-ubyte.gz": content}


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (emnist_files(kind="letters")[0], "Dataset not found"),
        (emnist_member("labels-idx1", gzip.compress(idx(np.arange(9, dtype=np.uint8))[:-2])), "RuntimeError: shape"),
        (emnist_member("labels-idx1", gzip.compress(b"\0\0\x0b\x01" + idx(np.arange(9, dtype=np.uint8))[4:])),
            "ValueError: buffer"),
        (emnist_member("images-idx3", gzip.compress(b"")), "cannot be read as emnist"),
        (emnist_member("images-idx3", b"no gzip file"), "BadGzipFile"),
        (emnist_member("labels-idx1", gzip.compress(idx(np.zeros(7, np.uint8)))),
            r"expected bytes of \[28, 28\] with a label each"),
    ],
)  # fmt: skip
def test_emnist_archives_that_are_wrong_inside(
    tmp_path: Path, monkeypatch: MonkeyPatch, files: dict[str, bytes], message: str
) -> None:
    content = {} if any("letters" in name for name in files) else emnist_files()[0]
    expect_emnist(monkeypatch, tmp_path, content | files)
    with pytest.raises(ArchiveError, match=message):
        emnist(tmp_path)


# --- `download = true` from a server on this machine: whole, cut and missing.


CIFAR = "cifar-10-python.tar.gz"


@pytest.fixture
def server_folder(tmp_path: Path, monkeypatch: MonkeyPatch) -> Path:
    """Return a folder with small archives whose checksums torchvision expects; published addresses do not answer."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    folder = tmp_path / "server"
    folder.mkdir()
    small_cifar(monkeypatch, folder, 10)
    small_emnist(monkeypatch, folder)
    for name in ("CIFAR10", "EMNIST"):
        monkeypatch.setattr(getattr(torchvision(), name), "url", "http://127.0.0.1:9/nobody")
    return folder


def test_a_download_is_unpacked_and_used_the_next_time(tmp_path: Path, server_folder: Path) -> None:
    folder = tmp_path / "data"
    with serve(server_folder) as address:
        assert len(cifar10(folder, clients=3, download=True, url=f"{address}/{CIFAR}")) == 3
        assert len(emnist(folder, clients=2, download=True, url=f"{address}/EMNIST/raw/gzip.zip")) == 2
    assert sorted(p.name for p in folder.iterdir()) == ["EMNIST", "cifar-10-batches-py", CIFAR]
    assert len(cifar10(folder, clients=3, download=True)) == 3  # without a request
    shutil.rmtree(folder / "cifar-10-batches-py")
    assert len(cifar10(folder, clients=3)) == 3


def test_the_published_address_is_the_usual_one(tmp_path: Path, server_folder: Path, monkeypatch: MonkeyPatch) -> None:
    with serve(server_folder) as address:
        monkeypatch.setattr(torchvision().CIFAR10, "url", f"{address}/{CIFAR}")
        assert len(cifar10(tmp_path / "data", clients=3, download=True)) == 3


def test_a_failed_download_does_not_hinder_the_next(tmp_path: Path, server_folder: Path) -> None:
    folder = tmp_path / "data"
    whole = (server_folder / CIFAR).read_bytes()
    with serve(server_folder) as address:
        url = f"{address}/{CIFAR}"
        for content in (whole[:-40], b"<html>Please sign in</html>", b""):
            (server_folder / CIFAR).write_bytes(content)
            with pytest.raises(ArchiveError, match="cannot be read as cifar10 .*not found or corrupted"):
                cifar10(folder, download=True, url=url)
        with pytest.raises(ConnectionError, match=r"nothing could not be downloaded \(.*404.*put it at .*" + CIFAR):
            cifar10(folder, download=True, url=f"{address}/nothing")
        (server_folder / CIFAR).write_bytes(whole)
        assert len(cifar10(folder, clients=3, download=True, url=url)) == 3


def test_no_network(tmp_path: Path, server_folder: Path) -> None:
    url = "http://127.0.0.1:9/a.tar.gz"
    with pytest.raises(ConnectionError, match=f"{url} could not be downloaded .*; fetch it elsewhere and put it at"):
        cifar10(tmp_path / "data", download=True, url=url)


@pytest.mark.slow
def test_the_command_line(tmp_path: Path, server_folder: Path, monkeypatch: MonkeyPatch, capsys) -> None:
    """From nothing to a finished run; then without the server; then with an archive that is cut."""
    monkeypatch.chdir(tmp_path)
    run = ["run", "exp.toml", "--run-dir"]
    with serve(server_folder) as address:
        Path("exp.toml").write_text(
            f"data = 'cifar10'\nclients = 2\nparticipation = 1.0\nmodel = 'mlp'\nrounds = 1\n"
            "client_test_split = 'shared'\n"
            f"data_options = {{url = '{address}/{CIFAR}'}}\n"
        )
        assert cli.main([*run, "first"]) == 1
        assert re.search(r"error: no .*cifar-10-python.tar.gz of cifar10.*download=true", capsys.readouterr().err)
        assert cli.main([*run, "first", "--download"]) == 0
    assert cli.main([*run, "second"]) == 0
    files = [Path(name, "metrics.jsonl") for name in ("first", "second")]
    losses = [json.loads(file.read_text().splitlines()[-1])["test_loss"] for file in files]
    assert losses[0] == losses[1] > 0
    shutil.rmtree("data/cifar-10-batches-py")
    archive = Path("data", CIFAR)
    archive.write_bytes(archive.read_bytes()[:-9])
    capsys.readouterr()
    assert cli.main([*run, "third"]) == 1
    message = capsys.readouterr().err
    assert "not the complete" in message and "Traceback" not in message and not Path("third").exists()
