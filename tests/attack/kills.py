"""Runs that are killed in different ways. After a resume they must have the bits of an undisturbed run."""

import os
import resource
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tests.attack.trials import Attack, Trial
from tests.helpers.fed_kill import EXIT_DIED, die_at_operation, digest, finish, train, wait_for_fork

ROUNDS, LONG = 3, 9
INTERRUPTED = 130  # exit code of `forked` after Ctrl-C
SEQUENTIAL: dict[str, Any] = {"executor": "sequential", "dropout": 0.0}
THREADS: dict[str, Any] = {"executor": "threads", "slots": 3, "dropout": 0.0}  # which take no model that draws
_NEVER = 10**9


class FullRun(NamedTuple):
    """An undisturbed run."""

    digest: str
    operations: int  # on files
    bytes: int  # size of the run's largest file
    seconds: float


def measure_run(folder: Path, rounds: int, **options: Any) -> FullRun:
    # modules are imported at first use, so that the measured run does not spend time on it
    train(folder / "warm", rounds=1, **options)
    start = time.perf_counter()
    train(folder / "whole", rounds=rounds, **options)
    seconds = time.perf_counter() - start
    operations_file = folder / "operations"
    pid = wait_for_fork(lambda: operations_file.write_text(str(die_at_operation(folder / "counted", _NEVER))))
    if finish(pid) != 0:
        raise RuntimeError("an undisturbed run failed")
    size = max(path.stat().st_size for path in (folder / "whole").rglob("*") if path.is_file())
    return FullRun(digest(folder / "whole"), int(operations_file.read_text()), size, seconds)


def check_resume(trial: Trial, directory: Path, rounds: int, **options: Any) -> int:
    train(directory, rounds=rounds, **options)
    assert digest(directory) == trial.common.digest, "the resumed run ended in other bits"
    return 1


def kill_at_operation(trial: Trial) -> int:
    """kill -9 before one of the operations on its files, each in turn; in half of the trials before one of the resumed
    run too."""
    directory = trial.folder / "run"
    count = trial.number * 7919 % trial.common.operations  # a prime: neighbours in time are far from each other
    assert finish(wait_for_fork(partial(die_at_operation, directory, count))) == EXIT_DIED
    if trial.rng.random() < 0.5:
        code = finish(wait_for_fork(partial(die_at_operation, directory, trial.rng.randrange(trial.common.operations))))
        assert code in (0, EXIT_DIED), f"the resumed run left with {code}"
    return check_resume(trial, directory, ROUNDS)


def kill_in_write(trial: Trial) -> int:
    """Kill a run in the middle of a write, by a limit on the size of its files, and resume it."""
    directory, size = trial.folder / "run", trial.rng.randrange(trial.common.bytes)

    def train_with_limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
        train(directory, rounds=ROUNDS)

    code = finish(wait_for_fork(train_with_limit))
    assert code == -signal.SIGXFSZ, f"it left with {code}, with files of at most {size} bytes"
    return check_resume(trial, directory, ROUNDS)


def kill_at_instants(trial: Trial) -> int:
    """kill -9 at random times, up to five in a row."""
    directory, kills = trial.folder / "run", 0
    for _ in range(trial.rng.randint(1, 5)):
        pid = wait_for_fork(partial(train, directory))
        time.sleep(trial.rng.uniform(0, trial.common.seconds))
        os.kill(pid, signal.SIGKILL)
        code = finish(pid)
        assert code in (0, -signal.SIGKILL), f"it left with {code}"
        kills += code != 0
    check_resume(trial, directory, LONG)
    return kills


def interrupt(trial: Trial) -> int:
    """SIGINT at random times, to one thread and to several that train; nothing of torch stays switched off."""
    directory = trial.folder / "run"
    options = trial.rng.choice([SEQUENTIAL, THREADS])

    def work() -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            train(directory, **options)
        finally:
            assert torch.is_grad_enabled(), "autograd was left switched off"

    pid = wait_for_fork(work)
    time.sleep(trial.rng.uniform(0.02, 0.02 + trial.common.seconds))
    os.kill(pid, signal.SIGINT)
    code = finish(pid)
    assert code in (0, INTERRUPTED), f"{options} left with {code}"
    return check_resume(trial, directory, LONG, **SEQUENTIAL)


ATTACKS = (
    Attack(
        "kill-operation",
        "a run killed before any operation on its files goes on with the same bits",
        kill_at_operation,
        lambda folder: measure_run(folder, ROUNDS),
        share=2,
    ),
    Attack(
        "kill-write",
        "the same for one killed in the middle of a write",
        kill_in_write,
        lambda folder: measure_run(folder, ROUNDS),
    ),
    Attack(
        "kill-instant",
        "the same for kills at random instants, several in a row",
        kill_at_instants,
        lambda folder: measure_run(folder, LONG),
    ),
    Attack(
        "ctrl-c",
        "Ctrl-C comes out as it is; the run goes on with the same bits",
        interrupt,
        lambda folder: measure_run(folder, LONG, **SEQUENTIAL),
    ),
)
