"""Disks that are full, or that may not be written: the error names the file, and with some room the run goes on in the
same bits."""

import errno
import os
import resource
import shutil
import signal
import stat
from pathlib import Path
from typing import Any, NamedTuple

from fastsam import fed
from tests.attack.trials import Attack, Trial
from tests.helpers.fed_kill import finish, forked
from tests.helpers.fed_rundir import records, start

ROUNDS = 3
NOBODY = 65534
TOLD = 3  # the exit code of a run that said what it cannot write


class Whole(NamedTuple):
    """An undisturbed run."""

    directory: Path
    model: bytes
    records: list[dict[str, Any]]
    syncs: int  # number of files synchronised to the disk
    bytes: int  # size of the run's largest file


def go(directory: Path, rounds: int = ROUNDS) -> fed.Result:
    return start(directory, algorithm=fed.SCAFFOLD(), rounds=rounds, resume=True, executor="sequential")


def prepare(folder: Path) -> Whole:
    directory = folder / "run"
    go(folder / "half", ROUNDS - 1)
    counted = folder / "syncs"
    if finish(forked(lambda: counted.write_text(str(_full_after(10**9, directory))))) != 0:
        raise RuntimeError("an undisturbed run failed")
    size = max(path.stat().st_size for path in directory.rglob("*") if path.is_file())
    model = (directory / "model.safetensors").read_bytes()
    return Whole(folder / "half", model, records(directory), int(counted.read_text()), size)


def _full_after(syncs: int, directory: Path) -> int:
    """The run on a disk that is full from then on; how often it wrote something."""
    seen, real = [0], os.fsync

    def fsync(descriptor: int) -> None:
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            seen[0] += 1
            if seen[0] > syncs:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(descriptor)

    os.fsync = fsync  # type: ignore[assignment]
    go(directory)
    return seen[0]


def _limited_to(size: int, directory: Path) -> None:
    """Limit the size of files, so that a write of the run fails in the middle."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    go(directory)


def no_room(trial: Trial) -> int:
    """At one of its writes, or in the middle of one."""
    directory, common = trial.folder / "run", trial.common

    def work() -> None:
        try:
            if trial.number % 2:
                _limited_to(trial.rng.randrange(common.bytes), directory)
            else:
                _full_after(trial.number // 2 % common.syncs, directory)
        except OSError as error:
            assert error.errno in (errno.ENOSPC, errno.EFBIG), repr(error)
            assert str(directory) in str(error), f"the file is not named: {error}"
            os._exit(TOLD)

    code = finish(forked(work))
    assert code == TOLD, f"a run without room left with {code}"
    assert not list(directory.rglob("*.tmp")), "what did not fit takes up room"
    return _as_undisturbed(directory, common)


def read_only(trial: Trial) -> int:
    """Make the directory, the checkpoint's directory or some files read-only, without the rights of root."""
    directory, rng = trial.folder / "run", trial.rng
    shutil.copytree(trial.common.directory, directory)
    paths = [directory, *sorted(directory.rglob("*"))]
    closed = rng.sample(paths, rng.randint(1, 3))
    if os.geteuid() == 0:
        for path in (trial.folder.parent, trial.folder, *paths):
            os.chown(path, NOBODY, NOBODY)
    for path in closed:
        path.chmod(0o555 if path.is_dir() else 0o444)

    def work() -> None:
        if os.geteuid() == 0:
            os.setgid(NOBODY)
            os.setuid(NOBODY)
        try:
            go(directory)
        except (OSError, fed.RunDirectoryError) as error:
            assert str(directory) in str(error), f"the file is not named: {error}"
            os._exit(TOLD)

    code = finish(forked(work))
    for path in filter(Path.exists, closed):  # a checkpoint's file may have been replaced
        path.chmod(0o755 if path.is_dir() else 0o644)
    names = ", ".join(path.name for path in closed)
    assert code in (0, TOLD), f"a run that may not write {names} left with {code}"
    return _as_undisturbed(directory, trial.common)


def _as_undisturbed(directory: Path, common: Whole) -> int:
    go(directory)
    same = (directory / "model.safetensors").read_bytes() == common.model
    assert same and records(directory) == common.records, "continued in other bits"
    return 1


ATTACKS = (
    Attack("full-disk", "a full disk is told with the file's name; with room again, the same bits", no_room, prepare),
    Attack("read-only", "so is what may not be written", read_only, prepare, share=0.5),
)
