"""Runs of several processes of which one dies."""

import os
from pathlib import Path
from typing import Any

from tests.attack.trials import Attack, Trial
from tests.helpers import fed_ranks
from tests.helpers.rank_group import on_ranks

STEPS = 60  # number of loss evaluations of one rank in four rounds


def loses_a_rank(rank: int, folder: Path, name: str, lost: int, step: int) -> str:
    options = {"loss": fed_ranks.deadly_loss(step)} if rank == lost else {}
    return fed_ranks.train(name, folder, resume=True, **options)


def one_is_lost(trial: Trial) -> int:
    """kill -9 to one rank in some step of the training: the others say so, in time, and a single process continues."""
    name, size = trial.rng.choice(sorted(fed_ranks.ALGORITHMS)), trial.rng.choice([2, 3])
    lost, step = trial.rng.randrange(size), trial.rng.randint(1, STEPS)
    answers = on_ranks(size, loses_a_rank, trial.folder, name, lost, step, patience=60.0)
    died = answers[lost] == "died"
    for answer in answers if not died else [a for i, a in enumerate(answers) if i != lost]:
        told = answer.startswith("RankError: ") if died else answer == trial.common[name]
        assert told, f"{name}, {size} ranks, rank {lost} killed at step {step}: {answer}"
    assert fed_ranks.train(name, trial.folder, resume=True) == trial.common[name], "other bits than without a loss"
    return 1


def prepare(folder: Path) -> dict[str, Any]:
    os.environ["OMP_NUM_THREADS"] = "1"
    return {name: fed_ranks.train(name, None) for name in fed_ranks.ALGORITHMS}


ATTACKS = (
    Attack(
        "lost-rank",
        "a rank that dies ends the run in seconds, and one process continues it with the same bits",
        one_is_lost,
        prepare,
        forked=False,
    ),
)
