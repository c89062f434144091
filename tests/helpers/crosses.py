"""Crosses that are too wide for `make test`."""

import itertools
from collections.abc import Iterable
from typing import Any

import pytest


def one_in(count: int, *axes: Iterable[Any]) -> list[Any]:
    """Return the product of the axes as parameters. `make test` runs one in `count` of them, the others are slow.

    It runs diagonals, in which every value of every axis occurs with different values of the other axes.
    """
    values = [list(axis) for axis in axes]
    return [
        pytest.param(
            *(axis[i] for axis, i in zip(values, indices)), marks=[] if sum(indices) % count == 0 else pytest.mark.slow
        )
        for indices in itertools.product(*(range(len(axis)) for axis in values))
    ]
