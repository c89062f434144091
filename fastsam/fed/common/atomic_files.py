"""Files that are replaced in one step, so that a kill at any instant leaves a whole one."""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any


@contextmanager
def errors_with_path(path: Path) -> Iterator[None]:
    """Add the file's name to an OSError inside, such as the error of a full disk."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def write_bytes(path: Path, data: bytes, folder_may_be_link: bool = True) -> None:
    """Replace a file in one step. After a kill or a power cut it holds either the old or the new content.

    A symbolic link at its path is replaced and not followed.

    Raises:
        OSError: the file cannot be written, for example because the disk is full; the old file stays. Also if the
            folder is a link and `folder_may_be_link` is False.
    """
    with errors_with_path(path):
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | (0 if folder_may_be_link else os.O_NOFOLLOW))
        try:
            _replace(folder, path.name, data)
            os.fsync(folder)
        finally:
            os.close(folder)


def _replace(folder: int, name: str, data: bytes) -> None:
    """Replace a file of the folder that has this descriptor."""
    temporary, flags = f"{name}.tmp", os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    with suppress(FileNotFoundError):
        os.unlink(temporary, dir_fd=folder)  # a killed run left it
    with open(os.open(temporary, flags, 0o666, dir_fd=folder), "wb") as file:
        try:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        except OSError:
            os.unlink(temporary, dir_fd=folder)  # the room that it has taken is of use
            raise
    os.replace(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)


def open_regular(path: Path, flags: int) -> int:
    """Return a descriptor of a regular file. Raises OSError for a pipe, say: opening it would wait for ever."""
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "is not a regular file", str(path))
    return descriptor


def read_bytes(path: Path) -> bytes:
    """Return the contents of a regular file. Raises OSError as `open_regular` does."""
    with open(open_regular(path, os.O_RDONLY), "rb") as file:
        return file.read()


def read_json(path: Path) -> Any:
    """Return what a JSON file holds. Raises OSError as `open_regular` does, ValueError if it is not JSON."""
    try:
        return json.loads(read_bytes(path))
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def make_directory(path: Path, advice: str = "choose another run directory") -> None:
    """Make the directory and its parents. Raises OSError with `advice` if it cannot be made or written to."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(f"the directory {path} cannot be made ({error.strerror}); {advice}") from error
    if not os.access(path, os.W_OK | os.X_OK):
        raise OSError(f"the directory {path} cannot be written to; {advice}")


def write_json(path: Path, content: Any) -> None:
    """Replace a JSON file in one step."""
    write_bytes(path, (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode())
