"""CIFAR and EMNIST through torchvision's data sets, which have the published addresses and checksums and read the
files.

This module adds four things. A published archive may be in the data directory. Downloads and unpacked files are made in
a separate folder and moved when they are complete, so that an interrupted attempt leaves no files. A download
stops when no data come. An error names the wrong file and the right one.
"""

from __future__ import annotations

import os
import pickle
import socket
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.client import HTTPException
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from fastsam.fed.common.atomic_files import make_directory
from fastsam.fed.common.import_paths import vision

PATIENCE = 60.0  # seconds without a byte after which a download has failed; torchvision itself waits for ever

# Errors of torchvision and its readers for a file that is cut or has other content.
_UNREADABLE = (
    RuntimeError, OSError, ValueError, LookupError, TypeError, AssertionError, EOFError,
    pickle.PickleError, tarfile.TarError, zipfile.BadZipFile, zlib.error,
)  # fmt: skip


class ArchiveError(ValueError):
    """An archive that is cut, damaged, or of another data set; the message says what was expected and what to do."""


@dataclass(frozen=True)
class Archive:
    """A published file and the class of `torchvision.datasets` that reads it.

    Attributes:
        data: name of the data set.
        reader: the class. Its `url` and the attribute named `checksum` (MD5, in hex) describe the expected file.
        name: name of the file.
        folder: folder that torchvision unpacks it to.
        place: place in a directory where torchvision looks for it.
    """

    data: str
    reader: str
    name: str
    checksum: str
    folder: str
    place: str = ""
    options: dict[str, str] = field(default_factory=dict)

    def read(self, data_dir: str | Path, download: bool = False, url: str | None = None) -> tuple[Any, Any]:
        """Training and test part, objects of torchvision with `data` and `targets`.

        They come from `data_dir` or from a directory named after the data set in it: from the folder that torchvision
        has unpacked, or else from the archive, which is checked and unpacked to that folder (to a temporary one where
        `data_dir` cannot be written).
        download: fetch the archive when neither is there. url: from a mirror; the checksum stays the published one.
        Raises ImportError without torchvision, FileNotFoundError, ArchiveError, ConnectionError.
        """
        reader = self._reader(url)
        roots = [Path(data_dir), Path(data_dir) / self.data]
        error_of_folder = None
        for root in (root for root in roots if (root / self.folder).is_dir()):
            try:
                advice = (
                    f"is it cut or of another data set? Put the published {self.name} into {root}, or say download=true"
                )
                return self._parts(reader, root, root / self.folder, advice)
            except ArchiveError as error:
                error_of_folder = error
        candidates = [(root, root / place / self.name) for root in roots for place in ("", self.place)]
        root, path = next(((root, path) for root, path in candidates if path.is_file()), candidates[0])
        if path.is_file():
            self._check(path, reader, f"{path}: ")
        elif download:
            self._download(reader, path)
        else:
            raise error_of_folder or FileNotFoundError(
                f"no {self.name} of {self.data} in {root.resolve()}; put the file there (from {reader.url}), name its "
                "directory with data_dir, or say download=true"
            )
        return self._unpack(reader, root, path)

    def _reader(self, url: str | None) -> Any:
        reader = getattr(vision("torchvision.datasets", f"the data set {self.data!r}"), self.reader)
        return reader if url is None else type(reader.__name__, (reader,), {"url": url})

    def _parts(self, reader: Any, root: Path, source: Path, advice: str, **unpack: bool) -> tuple[Any, Any]:
        """Both parts from torchvision's folder in `root`; `source` and `advice` are for the message of an error."""
        try:
            train, test = (reader(root, train=train, **self.options, **unpack) for train in (True, False))
        except _UNREADABLE as error:
            raise ArchiveError(
                f"{source} cannot be read as {self.data} ({type(error).__name__}: {error}); {advice}"
            ) from error
        return train, test

    def _check(self, path: Path, reader: Any, prefix: str) -> None:
        published_checksum = getattr(reader, self.checksum)
        checksum = _utils().calculate_md5(path)
        if checksum != published_checksum:
            raise ArchiveError(
                f"{prefix}this is not the complete {self.name} of {self.data}: its MD5 is {checksum} "
                f"({path.stat().st_size} bytes), "
                f"expected {published_checksum}. A cut download or another file? Remove it and fetch it from "
                f"{reader.url}"
            )

    def _download(self, reader: Any, path: Path) -> None:
        """The archive at `path`; only a complete file ever has that name."""
        make_directory(path.parent, "name another with data_dir")
        with TemporaryDirectory(prefix=".fastsam-", dir=path.parent) as aside:
            part = Path(aside) / path.name
            try:
                with _patience(PATIENCE):
                    _utils().download_url(reader.url, aside, path.name)
            except (OSError, HTTPException, RuntimeError, ValueError) as error:
                raise ConnectionError(
                    f"{reader.url} could not be downloaded ({error}); fetch it elsewhere and put it at {path}"
                ) from error
            self._check(part, reader, f"the download from {reader.url}: ")
            part.replace(path)

    def _unpack(self, reader: Any, root: Path, path: Path) -> tuple[Any, Any]:
        """Return both parts from a checked archive. The unpacked files stay in `root` if it can be written."""
        keep = os.access(root, os.W_OK)
        with TemporaryDirectory(prefix=".fastsam-", dir=root if keep else None) as aside:
            link = Path(aside) / self.place / self.name
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(path.resolve())
            advice = f"its checksum is right; was there no room to unpack it in {Path(aside).parent}?"
            parts = self._parts(reader, Path(aside), path, advice, download=True)  # finds the archive: fetches nothing
            link.unlink()
            for file in (file for file in (Path(aside) / self.folder).rglob("*") if keep and file.is_file()):
                target = root / file.relative_to(aside)
                target.parent.mkdir(parents=True, exist_ok=True)
                file.replace(target)
        return parts


CIFAR10 = Archive("cifar10", "CIFAR10", "cifar-10-python.tar.gz", "tgz_md5", "cifar-10-batches-py")
CIFAR100 = Archive("cifar100", "CIFAR100", "cifar-100-python.tar.gz", "tgz_md5", "cifar-100-python")
EMNIST = Archive("emnist", "EMNIST", "gzip.zip", "md5", "EMNIST/raw", "EMNIST/raw", {"split": "byclass"})


def _utils() -> Any:
    return vision("torchvision.datasets.utils", "an archive")


@contextmanager
def _patience(seconds: float) -> Iterator[None]:
    """Connections that are opened inside fail after so long a silence."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(seconds)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)
