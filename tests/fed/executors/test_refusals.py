"""Refusals of the executors, with their messages."""

import pytest

from fastsam import fed
from tests.helpers.fed_refusals import refusals
from tests.helpers.fed_runs import run


@refusals(
    # a loop of an algorithm is refused
    (lambda: run(fed.FedRobust(), "vmap", 3), "FedRobust trains each client in a loop of its own"),
)
def test_refused(call, words, error):
    with pytest.raises(error, match=words):
        call()
