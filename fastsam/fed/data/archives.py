"""CIFAR and EMNIST through torchvision's data sets, which have the published addresses and checksums, and which
download, check, unpack and read the files."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.error import URLError

from fastsam.fed.common.import_paths import vision


class ArchiveError(ValueError):
    """An archive that is cut, damaged, or of another data set; the message says what was expected and what to do."""


@dataclass(frozen=True)
class Archive:
    """A published file and the class of `torchvision.datasets` that reads it.

    Attributes:
        data: name of the data set.
        reader: the class. Its `url` and the attribute named `checksum` (MD5, in hex) describe the expected file.
        path: path of the file in the data directory.
        folder: folder that torchvision unpacks it to.
        options: arguments of the class.
    """

    data: str
    reader: str
    path: str
    checksum: str
    folder: str
    options: dict[str, str] = field(default_factory=dict)

    def read(self, data_dir: str | Path, download: bool = False, url: str | None = None) -> tuple[Any, Any]:
        """Return the training and the test part, objects of torchvision with `data` and `targets`.

        Args:
            data_dir: directory with the archive, which is unpacked next to it, or with the folder that torchvision has
                unpacked.
            download: fetch the archive if it is missing or wrong.
            url: address of a mirror. The checksum stays the published one.

        Raises:
            ImportError: torchvision is missing.
            FileNotFoundError: there is neither the archive nor the folder.
            ArchiveError: the archive or the folder is damaged or of another data set.
            ConnectionError: the download failed.
        """
        reader = getattr(vision("torchvision.datasets", f"the data set {self.data!r}"), self.reader)
        if url is not None:
            reader = type(reader.__name__, (reader,), {"url": url})
        path, folder = Path(data_dir) / self.path, Path(data_dir) / self.folder
        if path.is_file() and not download:
            self._check(path, getattr(reader, self.checksum))
        elif not download and not folder.is_dir():
            raise FileNotFoundError(
                f"no {path} of {self.data}; put the file there (from {reader.url}), name its directory with data_dir, "
                "or say download=true"
            )
        options = {"download": download or path.is_file(), **self.options}  # a good archive is not fetched again
        try:
            train, test = (reader(data_dir, train=train, **options) for train in (True, False))
        except URLError as error:
            raise ConnectionError(
                f"{reader.url} could not be downloaded ({error}); fetch it elsewhere and put it at {path}"
            ) from error
        except Exception as error:  # torchvision and its readers raise many types for a damaged file
            raise ArchiveError(
                f"{folder} cannot be read as {self.data} ({type(error).__name__}: {error}). Remove it, and put the "
                f"published file at {path}, or say download=true"
            ) from error
        return train, test

    def _check(self, path: Path, expected_checksum: str) -> None:
        """Raise ArchiveError for a wrong archive, in place of which torchvision would download another."""
        if not vision("torchvision.datasets.utils", "an archive").check_integrity(path, expected_checksum):
            raise ArchiveError(
                f"{path} is not the complete file of {self.data} with the MD5 {expected_checksum}. Remove it and fetch "
                "it again, or say download=true"
            )


CIFAR10 = Archive("cifar10", "CIFAR10", "cifar-10-python.tar.gz", "tgz_md5", "cifar-10-batches-py")
CIFAR100 = Archive("cifar100", "CIFAR100", "cifar-100-python.tar.gz", "tgz_md5", "cifar-100-python")
EMNIST = Archive("emnist", "EMNIST", "EMNIST/raw/gzip.zip", "md5", "EMNIST/raw", {"split": "byclass"})
