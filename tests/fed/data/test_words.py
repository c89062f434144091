"""The simulators' dealing from blocks of words: the numbers that numpy's generator gives one by one, and the generator
left where they end."""

from __future__ import annotations

import numpy as np
import pytest

from fastsam.fed.data.dealing import Words, flags


@pytest.mark.parametrize("n", [1, 2, 3, 50, 64, 65, 1000, 100_000])
@pytest.mark.parametrize("count", [0, 1, 500])
def test_words_are_the_generators_own(n: int, count: int) -> None:
    theirs, ours = (np.random.RandomState(7) for _ in range(2))
    theirs.randint(5), ours.randint(5)  # not from a state's beginning
    words, slots = Words(ours), flags([1] * n)
    for i in range(count):
        client = theirs.randint(n)
        while not slots[client]:
            client = theirs.randint(n)
        assert words.first_open(slots) == client
        if i % 2 and sum(slots) > 1:
            slots[client] = 0
        if i % 3 == 0:
            assert words.uniform() == theirs.random_sample()
    words.close()
    assert (ours.randint(2**31, size=5) == theirs.randint(2**31, size=5)).all()
