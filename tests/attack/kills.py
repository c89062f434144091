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
from tests.helpers.fed_kill import DIED, dies_at, digest, finish, forked, train

ROUNDS, LONG = 3, 9
INTERRUPTED = 130  # exit code of `forked` after Ctrl-C
ALONE: dict[str, Any] = {"executor": "sequential", "dropout": 0.0}
THREADS: dict[str, Any] = {"executor": "threads", "slots": 3, "dropout": 0.0}  # which take no model that draws
_NEVER = 10**9


class Whole(NamedTuple):
    """An undisturbed run."""

    digest: str
    operations: int  # on files
    bytes: int  # size of the run's largest file
    seconds: float


def whole(folder: Path, rounds: int, **options: Any) -> Whole:
    # modules are imported at first use, so that the measured run does not spend time on it
    train(folder / "warm", rounds=1, **options)
    began = time.perf_counter()
    train(folder / "whole", rounds=rounds, **options)
    seconds = time.perf_counter() - began
    said = folder / "operations"
    pid = forked(lambda: said.write_text(str(dies_at(folder / "counted", _NEVER))))
    if finish(pid) != 0:
        raise RuntimeError("an undisturbed run failed")
    size = max(path.stat().st_size for path in (folder / "whole").rglob("*") if path.is_file())
    return Whole(digest(folder / "whole"), int(said.read_text()), size, seconds)


def resumed(trial: Trial, directory: Path, rounds: int, **options: Any) -> int:
    train(directory, rounds=rounds, **options)
    assert digest(directory) == trial.common.digest, "the resumed run ended in other bits"
    return 1


def at_an_operation(trial: Trial) -> int:
    """kill -9 before one of the operations on its files, each in turn; in half of the trials before one of the resumed
    run too."""
    directory, count = trial.folder / "run", trial.number % trial.common.operations
    assert finish(forked(partial(dies_at, directory, count))) == DIED
    if trial.rng.random() < 0.5:
        again = finish(forked(partial(dies_at, directory, trial.rng.randrange(trial.common.operations))))
        assert again in (0, DIED), f"the resumed run left with {again}"
    return resumed(trial, directory, ROUNDS)


def in_a_write(trial: Trial) -> int:
    """Kill a run in the middle of a write, by a limit on the size of its files, and resume it."""
    directory, size = trial.folder / "run", trial.rng.randrange(trial.common.bytes)

    def limited() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
        train(directory, rounds=ROUNDS)

    code = finish(forked(limited))
    assert code == -signal.SIGXFSZ, f"it left with {code}, with files of at most {size} bytes"
    return resumed(trial, directory, ROUNDS)


def at_instants(trial: Trial) -> int:
    """kill -9 at random times, up to five in a row."""
    directory, kills = trial.folder / "run", 0
    for _ in range(trial.rng.randint(1, 5)):
        pid = forked(partial(train, directory))
        time.sleep(trial.rng.uniform(0, trial.common.seconds))
        os.kill(pid, signal.SIGKILL)
        code = finish(pid)
        assert code in (0, -signal.SIGKILL), f"it left with {code}"
        kills += code != 0
    resumed(trial, directory, LONG)
    return kills


def by_ctrl_c(trial: Trial) -> int:
    """SIGINT at random times, to one thread and to several that train; nothing of torch stays switched off."""
    directory = trial.folder / "run"
    options = trial.rng.choice([ALONE, THREADS])

    def work() -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            train(directory, **options)
        finally:
            assert torch.is_grad_enabled(), "autograd was left switched off"

    pid = forked(work)
    time.sleep(trial.rng.uniform(0.02, 0.02 + trial.common.seconds))
    os.kill(pid, signal.SIGINT)
    code = finish(pid)
    assert code in (0, INTERRUPTED), f"{options} left with {code}"
    return resumed(trial, directory, LONG, **ALONE)


ATTACKS = (
    Attack(
        "kill-operation",
        "a run killed before any operation on its files goes on with the same bits",
        at_an_operation,
        lambda folder: whole(folder, ROUNDS),
        share=2,
    ),
    Attack(
        "kill-write",
        "the same for one killed in the middle of a write",
        in_a_write,
        lambda folder: whole(folder, ROUNDS),
    ),
    Attack(
        "kill-instant",
        "the same for kills at random instants, several in a row",
        at_instants,
        lambda folder: whole(folder, LONG),
    ),
    Attack(
        "ctrl-c",
        "Ctrl-C comes out as it is; the run goes on with the same bits",
        by_ctrl_c,
        lambda folder: whole(folder, LONG, **ALONE),
    ),
)
