"""What is made ahead for rounds: the same for a round whenever it is asked for, each thing once, errors where they are
asked for."""

from __future__ import annotations

import threading

import pytest

from fastsam.fed.privacy.ahead import Ahead


def in_blocks(made: list[range], at_once: int) -> Ahead[int]:
    """Squares; made: takes what was asked for together."""

    def make(rounds: range) -> list[int]:
        made.append(rounds)
        return [t * t for t in rounds]

    return Ahead(make, at_once)


@pytest.mark.parametrize("at_once", [1, 4])
def test_each_block_is_made_once_and_early(at_once: int) -> None:
    made: list[range] = []
    ahead = in_blocks(made, at_once)
    for t in range(10):
        ahead.begin(t)
        assert ahead.of(t) == ahead.of(t) == t * t
    last = (9 + at_once - 1) // at_once  # the block that the last round has begun
    ahead.of(last * at_once)
    assert made == [range(b * at_once, (b + 1) * at_once) for b in range(last + 1)]


def test_a_run_that_goes_on_has_what_the_whole_one_had() -> None:
    made: list[range] = []
    ahead = in_blocks(made, 4)
    assert [ahead.of(t) for t in (6, 7, 8, 2)] == [36, 49, 64, 4]
    assert made[:3] == [range(4, 8), range(8, 12), range(0, 4)]


def test_it_works_in_a_thread_and_what_it_raises_comes_where_it_is_asked_for() -> None:
    places: list[str] = []

    def make(rounds: range) -> list[float]:
        places.append(threading.current_thread().name)
        return [1 / t for t in rounds]

    ahead = Ahead(make, 2)
    ahead.begin(0)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            ahead.of(0)
    assert ahead.of(3) == 1 / 3
    assert threading.current_thread().name not in places


def test_what_is_asked_for_is_made_before_what_comes_later() -> None:
    made: list[range] = []
    assert in_blocks(made, 4).of(30) == 900  # whose block is number 7; 8 is begun with it
    assert made[0] == range(28, 32)
