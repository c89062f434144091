"""One process at a time in a run directory: the system's lock on the directory itself. It ends with a killed
process."""

from __future__ import annotations

import fcntl
import logging
import os
from pathlib import Path
from types import TracebackType

from fastsam.fed.rundir.manifest import RunDirectoryError

log = logging.getLogger("fastsam.fed")


class Lock:
    """A context manager that locks directories and releases them at its end."""

    def __init__(self) -> None:
        self._descriptor: int | None = None

    def take(self, path: Path) -> None:
        """Locks a directory that exists, once. Raises RunDirectoryError when another run holds it."""
        if self._descriptor is not None:
            return
        self._descriptor = os.open(path, os.O_RDONLY)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise RunDirectoryError(
                f"another run is working in {path}; wait until it has ended, or choose another run_dir"
            ) from error
        except OSError as error:  # a file system without locks
            log.warning("%s cannot be locked (%s): see that no other run works in it", path, error.strerror)

    def __enter__(self) -> Lock:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
