"""Crosses that are too wide for `make test`."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import pytest


def one_in(count: int, *axes: Iterable[Any]) -> list[Any]:
    """The product of the axes, as parameters. One in `count` of them is met by `make test`, the others are slow.

    Those that are met lie on diagonals: every value of every axis is among them, with other values of the other axes.
    """
    values = [list(axis) for axis in axes]
    return [
        pytest.param(*(axis[i] for axis, i in zip(values, at)), marks=[] if sum(at) % count == 0 else pytest.mark.slow)
        for at in itertools.product(*(range(len(axis)) for axis in values))
    ]
