"""Several ranks, what can be odd about them: on processes that fork, without a launcher (see `rank_group`)."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from fastsam.fed.sums.ranks import Ranks
from tests.helpers import rank_cases
from tests.helpers.rank_group import on_ranks


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    return rank_cases.train_all(0, None)


def test_the_cases_are_what_they_are_called(alone: dict[str, Any]) -> None:
    assert 0 < alone["excluded"][2] < 3 * len(rank_cases.SIZES)
    assert 0 < alone["client error"][2] < 3 * len(rank_cases.SIZES)
    assert alone["outlier"][2] > 0
    assert len({digest for digest, _, _ in alone.values()}) == len(alone)


@pytest.mark.parametrize("size", [2, 3])
def test_every_rank_ends_as_one_alone(size: int, alone: dict[str, Any]) -> None:
    """Weights, records, measures, exclusions and the size of the state."""
    assert on_ranks(size, rank_cases.train_all, None) == [alone] * size


def test_the_directory_is_that_of_rank_0(tmp_path: Path) -> None:
    assert len({*on_ranks(3, rank_cases.other_directories, tmp_path)}) == 1
    assert [p.name for p in tmp_path.iterdir()] == ["first"]


def test_files_of_three_ranks_are_resumed_by_two_and_those_by_one(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    on_ranks(3, rank_cases.resumed, folder, 2)
    files = {p.name for p in (folder / "checkpoint").glob("clients-*")}
    assert {name.split("-")[2][0] for name in files} == {"0", "1", "2"}
    on_ranks(2, rank_cases.resumed, folder, 4)
    assert rank_cases.resumed(0, folder, 6) == rank_cases.resumed(0, tmp_path / "alone", 6)


@pytest.mark.alone
def test_an_error_on_one_rank_ends_the_others_in_seconds(tmp_path: Path) -> None:
    began = time.monotonic()
    first, second = on_ranks(2, rank_cases.fails_on_rank_1, tmp_path / "run")
    assert time.monotonic() - began < 30
    assert first.startswith("RankError: a rank of this run has died or was stopped")
    assert second.startswith("ClientError: client") and "ValueError: bad labels" in second
    assert rank_cases.resumed(0, tmp_path / "run", 4) == rank_cases.resumed(0, tmp_path / "alone", 4)


def test_ctrl_c_is_told_as_such_and_the_run_continues(tmp_path: Path) -> None:
    first, second = on_ranks(2, rank_cases.interrupted, tmp_path / "run")
    assert first == "KeyboardInterrupt: by the user" and second.startswith("RankError")
    assert rank_cases.resumed(0, tmp_path / "run", 4) == rank_cases.resumed(0, tmp_path / "alone", 4)


def test_ranks_that_are_not_alike_are_refused() -> None:
    for answer in on_ranks(2, rank_cases.other_weights):
        assert answer.startswith(
            "RankError: all ranks must be called alike, but 'weights' of rank 1 is not that of rank 0"
        )


def test_a_robust_rule_needs_the_rows_of_all_clients() -> None:
    for answer in on_ranks(2, rank_cases.robust):
        assert answer.startswith("ValueError: aggregation='median' looks at the rows of all clients of a round")


def test_the_cohort_is_that_of_rank_0() -> None:
    assert on_ranks(3, rank_cases.own_dice) == [rank_cases.own_dice(0)] * 3


def test_a_rank_that_dies_is_noticed() -> None:
    killed, told = on_ranks(2, _dies_on_rank_0)
    assert killed == "died" and told.startswith("RankError")


def _dies_on_rank_0(rank: int) -> Any:
    dist.barrier()  # nobody is still on the way in
    if rank == 0:
        os._exit(1)
    return Ranks(rank, dist.get_world_size()).gather(rank)
