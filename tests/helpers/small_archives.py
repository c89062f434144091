"""Small archives in the published formats of CIFAR and EMNIST, and a torchvision that expects them instead of the
published ones."""

import functools
import gzip
import hashlib
import http.server
import io
import os
import pickle
import tarfile
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from fastsam.fed.common.import_paths import vision
from fastsam.fed.data import archives, folders

Content = dict[str, tuple[np.ndarray, list[int]]]
RNG = np.random.default_rng(5)


def torchvision(module: str = "torchvision.datasets") -> Any:
    """Return the module, or skip the test with the reason if torchvision is missing."""
    try:
        return vision(module, "this test")
    except ImportError as error:
        pytest.skip(str(error))


class Hostile:
    """A pickle that ends the process that loads it."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (os._exit, (1,))


def md5(content: bytes) -> str:
    return hashlib.md5(content).hexdigest()


def python2_string(text: bytes) -> bytes:
    """Return the pickle of a str by Python 2: SHORT_BINSTRING or BINSTRING."""
    return (b"U" + bytes([len(text)]) if len(text) < 256 else b"T" + len(text).to_bytes(4, "little")) + text


def python2_pickle(data: np.ndarray, labels: dict[str, list[int]]) -> bytes:
    """Return a batch as CIFAR has it: protocol 2 of Python 2, with an array of numpy 1."""
    array = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85" + python2_string(b"b") + b"\x87R"
    shape = b"".join(b"J" + n.to_bytes(4, "little") for n in data.shape) + b"\x86"
    dtype = b"cnumpy\ndtype\n" + python2_string(b"u1") + b"K\x00K\x01\x87R(K\x03" + python2_string(b"|") + b"NNN"
    dtype += b"J\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    array += b"(K\x01" + shape + dtype + b"I00\n" + python2_string(data.tobytes()) + b"tb"
    items = python2_string(b"data") + array
    for name, values in labels.items():
        items += python2_string(name.encode()) + b"](" + b"".join(b"K" + bytes([v]) for v in values) + b"e"
    return b"\x80\x02}(" + items + b"u."


def tar(path: Path, files: dict[str, bytes]) -> None:
    with tarfile.open(path, "w:gz") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))


def cifar_files(classes: int) -> tuple[dict[str, bytes], Content]:
    """Return the files of an archive of 12 images a batch, and the images and labels in them."""
    names = [f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"] if classes == 10 else ["train", "test"]
    meta = ("batches.meta", "label_names") if classes == 10 else ("meta", "fine_label_names")
    files = {"readme.html": b"<html>", meta[0]: pickle.dumps({meta[1]: [str(i) for i in range(classes)]}, 2)}
    content = {}
    for name in names:
        x, y = RNG.integers(0, 256, (12, 3072), dtype=np.uint8), RNG.integers(0, classes, 12).tolist()
        y[:2] = [0, classes - 1]
        kinds = {"labels": y} if classes == 10 else {"coarse_labels": [v // 5 for v in y], "fine_labels": y}
        files[name] = python2_pickle(x, kinds)
        content[name] = (x.reshape(-1, 3, 32, 32), y)
    return files, content


def expect_cifar(monkeypatch: pytest.MonkeyPatch, root: Path, classes: int, files: dict[str, bytes]) -> Path:
    """Write an archive of these files into `root`, and let torchvision expect its checksums."""
    archive, base = (archives.CIFAR10, "CIFAR10") if classes == 10 else (archives.CIFAR100, "CIFAR100")
    tar(root / archive.path, {f"{archive.folder}/{name}": content for name, content in files.items()})
    reader = getattr(torchvision(), base)
    for kind in ("train_list", "test_list"):
        names = [name for name, _ in getattr(reader, kind)]
        monkeypatch.setattr(reader, kind, [[name, md5(files.get(name, b""))] for name in names])
    meta = reader.meta["filename"]
    monkeypatch.setattr(reader, "meta", reader.meta | {"md5": md5(files.get(meta, b""))})
    monkeypatch.setattr(reader, "tgz_md5", md5((root / archive.path).read_bytes()))
    return root / archive.path


def small_cifar(monkeypatch: pytest.MonkeyPatch, root: Path, classes: int) -> Content:
    """Write CIFAR-10 or CIFAR-100 with 12 images a batch into `root`, and return its content."""
    files, content = cifar_files(classes)
    expect_cifar(monkeypatch, root, classes, files)
    return content


def idx(array: np.ndarray) -> bytes:
    return bytes((0, 0, 8, array.ndim)) + b"".join(n.to_bytes(4, "big") for n in array.shape) + array.tobytes()


def emnist_files(kind: str = "byclass") -> tuple[dict[str, bytes], Content]:
    files, content = {}, {}
    for part, count in (("train", 200), ("test", 50)):
        x = RNG.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        y = RNG.integers(0, 62, count).astype(np.uint8)
        y[0] = 61
        for name_of_part, array in (("images-idx3", x), ("labels-idx1", y)):
            files[f"emnist-{kind}-{part}-{name_of_part}-ubyte.gz"] = gzip.compress(idx(array))
        content[part] = (x, y.tolist())
    return files, content


def expect_emnist(monkeypatch: pytest.MonkeyPatch, root: Path, files: dict[str, bytes]) -> Path:
    path = root / archives.EMNIST.path
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(f"gzip/{name}", content)
    monkeypatch.setattr(torchvision().EMNIST, "md5", md5(path.read_bytes()))
    return path


def small_emnist(monkeypatch: pytest.MonkeyPatch, root: Path) -> Content:
    """Write EMNIST with 200 training and 50 test images into `root`, and return its content."""
    files, content = emnist_files()
    expect_emnist(monkeypatch, root, files)
    return content


@contextmanager
def serve(folder: Path) -> Iterator[str]:
    """Serve the files in `folder` and yield the address."""

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *arguments: Any) -> None:
            pass

    class Server(http.server.ThreadingHTTPServer):
        def handle_error(self, *arguments: Any) -> None:
            """Ignore a client that disconnects, as torchvision does to find out whether an address redirects."""

    server = Server(("127.0.0.1", 0), functools.partial(Handler, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)


SMALL = replace(folders.OFFICEHOME, classes=3)


def write_folders(root: Path, domains: tuple[str, ...] = ("Art", "Clipart", "Product", "Real World")) -> None:
    torchvision()
    rng = np.random.default_rng(1)
    for domain in domains:
        for c in range(SMALL.classes):
            folder = root / domain / f"class_{c}"
            folder.mkdir(parents=True)
            for i, (width, height) in enumerate([(40, 60), (64, 32)][: 1 + (c > 0)]):
                Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8)).save(folder / f"{i}.jpg")
