"""One process at a time in a run directory: the system's lock on the directory itself. It ends with a killed
process."""

from __future__ import annotations

import fcntl
import logging
import os
from contextlib import ExitStack
from pathlib import Path

from fastsam.fed.rundir.manifest import RunDirectoryError

log = logging.getLogger("fastsam.fed")


def lock_directory(path: Path, stack: ExitStack) -> None:
    """Lock a directory until the end of `stack`. Raises RunDirectoryError if another run has locked it."""
    descriptor = os.open(path, os.O_RDONLY)
    stack.callback(os.close, descriptor)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise RunDirectoryError(
            f"another run is working in {path}; wait until it has ended, or choose another run_dir"
        ) from error
    except OSError as error:  # a file system without locks
        log.warning("%s cannot be locked (%s): see that no other run works in it", path, error.strerror)
