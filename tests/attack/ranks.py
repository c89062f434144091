"""Runs of several processes of which one dies."""

import os
from pathlib import Path
from typing import Any

from tests.attack.trials import Attack, Trial
from tests.helpers import fed_ranks
from tests.helpers.rank_group import on_ranks

STEPS = 60  # number of loss evaluations of one rank in four rounds


def train_until_killed(rank: int, folder: Path, name: str, dead_rank: int, step: int) -> str:
    options = {"loss": fed_ranks.deadly_loss(step)} if rank == dead_rank else {}
    return fed_ranks.train(name, folder, resume=True, **options)


def kill_rank(trial: Trial) -> int:
    """kill -9 to one rank in some step of the training: the others say so, in time, and a single process continues."""
    name, size = trial.rng.choice(sorted(fed_ranks.ALGORITHMS)), trial.rng.choice([2, 3])
    dead_rank, step = trial.rng.randrange(size), trial.rng.randint(1, STEPS)
    answers = on_ranks(size, train_until_killed, trial.folder, name, dead_rank, step, patience=60.0)
    has_died = answers[dead_rank] == "died"
    for answer in answers if not has_died else [a for i, a in enumerate(answers) if i != dead_rank]:
        is_expected = answer.startswith("RankError: ") if has_died else answer == trial.common[name]
        assert is_expected, f"{name}, {size} ranks, rank {dead_rank} killed at step {step}: {answer}"
    assert fed_ranks.train(name, trial.folder, resume=True) == trial.common[name], "other bits than without a loss"
    return 1


def prepare(folder: Path) -> dict[str, Any]:
    os.environ["OMP_NUM_THREADS"] = "1"
    return {name: fed_ranks.train(name, None) for name in fed_ranks.ALGORITHMS}


ATTACKS = (
    Attack(
        "lost-rank",
        "a rank that dies ends the run in seconds, and one process continues it with the same bits",
        kill_rank,
        prepare,
        uses_fork=False,
    ),
)
