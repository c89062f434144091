"""`download = true` from a server on this machine: whole, cut, missing and silent; what is left for a second
attempt."""

from __future__ import annotations

import json
import re
import shutil
import socket
from pathlib import Path

import pytest

from fastsam.fed.data import archives, cifar10, emnist
from fastsam.fed.data.archives import ArchiveError
from fastsam.lab import cli
from tests.helpers.small_archives import served, small_cifar, small_emnist, torchvision

CIFAR = "cifar-10-python.tar.gz"


@pytest.fixture
def server_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with small archives, whose checksums torchvision expects; the published addresses are nobody's."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    folder = tmp_path / "server"
    folder.mkdir()
    small_cifar(monkeypatch, folder, 10)
    small_emnist(monkeypatch, folder)
    for name in ("CIFAR10", "EMNIST"):
        monkeypatch.setattr(getattr(torchvision(), name), "url", "http://127.0.0.1:9/nobody")
    return folder


def test_a_download_is_unpacked_and_used_the_next_time(tmp_path: Path, server_folder: Path) -> None:
    here = tmp_path / "data"
    with served(server_folder) as address:
        assert len(cifar10(here, clients=3, download=True, url=f"{address}/{CIFAR}")) == 3
        assert len(emnist(here, clients=2, download=True, url=f"{address}/gzip.zip")) == 2
    assert sorted(p.name for p in here.iterdir()) == ["EMNIST", "cifar-10-batches-py", CIFAR, "gzip.zip"]
    assert len(cifar10(here, clients=3, download=True)) == 3  # nobody is asked
    shutil.rmtree(here / "cifar-10-batches-py")
    assert len(cifar10(here, clients=3)) == 3


def test_the_published_address_is_the_usual_one(
    tmp_path: Path, server_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with served(server_folder) as address:
        monkeypatch.setattr(torchvision().CIFAR10, "url", f"{address}/{CIFAR}")
        assert len(cifar10(tmp_path / "data", clients=3, download=True)) == 3


def test_what_a_failed_download_leaves_does_not_hinder_the_next(tmp_path: Path, server_folder: Path) -> None:
    here = tmp_path / "data"
    whole = (server_folder / CIFAR).read_bytes()
    with served(server_folder) as address:
        url = f"{address}/{CIFAR}"
        for content in (whole[:-40], whole[:-1] + b"?", b"<html>Please sign in</html>", b""):
            (server_folder / CIFAR).write_bytes(content)
            with pytest.raises(ArchiveError, match=f"the download from {url}: this is not the complete {CIFAR}"):
                cifar10(here, download=True, url=url)
            assert list(here.iterdir()) == []
        with pytest.raises(ConnectionError, match=r"nothing could not be downloaded \(.*404.*put it at .*" + CIFAR):
            cifar10(here, download=True, url=f"{address}/nothing")
        (server_folder / CIFAR).write_bytes(whole)
        assert len(cifar10(here, clients=3, download=True, url=url)) == 3


def test_a_connection_that_breaks(tmp_path: Path, server_folder: Path) -> None:
    """The server promises more than it sends."""
    here = tmp_path / "data"
    size = (server_folder / CIFAR).stat().st_size
    whole = (server_folder / CIFAR).read_bytes()
    (server_folder / CIFAR).write_bytes(whole[: size // 2])
    with (
        served(server_folder, declared_length=size) as address,
        pytest.raises((ArchiveError, ConnectionError)) as caught,
    ):
        cifar10(here, download=True, url=f"{address}/{CIFAR}")
    assert f"{address}/{CIFAR}" in str(caught.value) and list(here.iterdir()) == []


@pytest.mark.parametrize("url", ["http://127.0.0.1:9/a.tar.gz", "no address"])
def test_no_network(tmp_path: Path, server_folder: Path, url: str) -> None:
    with pytest.raises(ConnectionError, match=f"{url} could not be downloaded .*; fetch it elsewhere and put it at"):
        cifar10(tmp_path / "data", download=True, url=url)
    assert list((tmp_path / "data").iterdir()) == []


def test_a_silent_server_is_given_up(tmp_path: Path, server_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archives, "PATIENCE", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        url = f"http://127.0.0.1:{listening.getsockname()[1]}/{CIFAR}"
        with pytest.raises(ConnectionError, match="timed out"):
            cifar10(tmp_path / "data", download=True, url=url)
    assert socket.getdefaulttimeout() is None


@pytest.mark.slow
def test_the_command_line(tmp_path: Path, server_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    """From nothing to a finished run; then without the server; then with an archive that is cut."""
    monkeypatch.chdir(tmp_path)
    run = ["run", "exp.toml", "--run-dir"]
    with served(server_folder) as address:
        Path("exp.toml").write_text(
            f"data = 'cifar10'\nclients = 2\nparticipation = 1.0\nmodel = 'mlp'\nrounds = 1\nvalidation = 'shared'\n"
            f"data_options = {{url = '{address}/{CIFAR}'}}\n"
        )
        assert cli.main([*run, "first"]) == 1
        assert re.search(r"error: no cifar-10-python.tar.gz of cifar10 in .*download=true", capsys.readouterr().err)
        assert cli.main([*run, "first", "--download"]) == 0
    assert cli.main([*run, "second"]) == 0
    losses = [
        json.loads(Path(name, "metrics.jsonl").read_text().splitlines()[-1])["test_loss"]
        for name in ("first", "second")
    ]
    assert losses[0] == losses[1] > 0
    shutil.rmtree("data/cifar-10-batches-py")
    archive = Path("data", CIFAR)
    archive.write_bytes(archive.read_bytes()[:-9])
    capsys.readouterr()
    assert cli.main([*run, "third"]) == 1
    message = capsys.readouterr().err
    assert "not the complete" in message and "Traceback" not in message and not Path("third").exists()


def test_a_place_that_cannot_be_written_is_told(
    tmp_path: Path, server_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"file/data cannot be made \(Not a directory\); name another with data_dir"):
        cifar10(tmp_path / "file" / "data", clients=3, download=True)
    monkeypatch.setattr("os.access", lambda path, mode: False)
    with pytest.raises(OSError, match="data cannot be written to; name another with data_dir"):
        cifar10(tmp_path / "data", clients=3, download=True)
