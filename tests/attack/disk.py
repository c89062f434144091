"""Disks that are full, or that may not be written: the error names the file, and with some room the run goes on in the
same bits."""

import errno
import os
import resource
import shutil
import signal
import stat
from pathlib import Path
from typing import NamedTuple

from fastsam import fed
from tests.attack import damage
from tests.attack.damage import FullRun, resume
from tests.attack.trials import Attack, Trial
from tests.helpers.fed_kill import finish, wait_for_fork

NOBODY_ID = 65534
EXIT_REPORTED = 3  # the exit code of a run that said what it cannot write


class Costs(NamedTuple):
    """A run directory, and the costs of an undisturbed run."""

    run: FullRun
    syncs: int  # number of files synchronised to the disk
    bytes: int  # size of the run's largest file


def prepare(folder: Path) -> Costs:
    run, directory = damage.prepare(folder), folder / "counted"
    count_file = folder / "syncs"
    if finish(wait_for_fork(lambda: count_file.write_text(str(_run_until_full(10**9, directory))))) != 0:
        raise RuntimeError("an undisturbed run failed")
    size = max(path.stat().st_size for path in directory.rglob("*") if path.is_file())
    return Costs(run, int(count_file.read_text()), size)


def _run_until_full(syncs: int, directory: Path) -> int:
    """Run on a disk that is full after `syncs` synchronised files, and return the number of synchronised files."""
    count, original = [0], os.fsync

    def fsync(descriptor: int) -> None:
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            count[0] += 1
            if count[0] > syncs:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        original(descriptor)

    os.fsync = fsync  # type: ignore[assignment]
    resume(directory)
    return count[0]


def _run_with_limit(size: int, directory: Path) -> None:
    """Limit the size of files, so that a write of the run fails in the middle."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    resume(directory)


def fill_disk(trial: Trial) -> int:
    """Fill the disk before a write of a run, or in the middle of a write, and resume the run."""
    directory, common = trial.folder / "run", trial.common

    def work() -> None:
        try:
            if trial.number % 2:
                _run_with_limit(trial.rng.randrange(common.bytes), directory)
            else:
                _run_until_full(trial.number // 2 % common.syncs, directory)
        except OSError as error:
            assert error.errno in (errno.ENOSPC, errno.EFBIG), repr(error)
            assert str(directory) in str(error), f"the file is not named: {error}"
            os._exit(EXIT_REPORTED)

    code = finish(wait_for_fork(work))
    assert code == EXIT_REPORTED, f"a run without room left with {code}"
    assert not list(directory.rglob("*.tmp")), "what did not fit takes up room"
    return _assert_original_bits(directory, common)


def make_read_only(trial: Trial) -> int:
    """Make the directory, the checkpoint's directory or some files read-only, without the rights of root."""
    directory, rng = trial.folder / "run", trial.rng
    shutil.copytree(trial.common.run.directory, directory)
    paths = [directory, *sorted(directory.rglob("*"))]
    read_only_paths = rng.sample(paths, rng.randint(1, 3))
    if os.geteuid() == 0:
        for path in (trial.folder.parent, trial.folder, *paths):
            os.chown(path, NOBODY_ID, NOBODY_ID)
    for path in read_only_paths:
        path.chmod(0o555 if path.is_dir() else 0o444)

    def work() -> None:
        if os.geteuid() == 0:
            os.setgid(NOBODY_ID)
            os.setuid(NOBODY_ID)
        try:
            resume(directory)
        except (OSError, fed.RunDirectoryError) as error:
            assert str(directory) in str(error), f"the file is not named: {error}"
            os._exit(EXIT_REPORTED)

    code = finish(wait_for_fork(work))
    for path in filter(Path.exists, read_only_paths):  # a checkpoint's file may have been replaced
        path.chmod(0o755 if path.is_dir() else 0o644)
    names = ", ".join(path.name for path in read_only_paths)
    assert code in (0, EXIT_REPORTED), f"a run that may not write {names} left with {code}"
    return _assert_original_bits(directory, trial.common)


def _assert_original_bits(directory: Path, common: Costs) -> int:
    resume(directory)
    assert common.run.equals(directory), "continued in other bits"
    return 1


ATTACKS = (
    Attack("full-disk", "a full disk is told with the file's name; with room again, the same bits", fill_disk, prepare),
    Attack("read-only", "so is what may not be written", make_read_only, prepare, share=0.5),
)
