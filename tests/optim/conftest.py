"""Fixtures that tests of several modules of the optimizer share."""

import gc
from collections.abc import Iterator

import pytest

from fastsam.optim import storage_swap


@pytest.fixture
def no_collection() -> Iterator[None]:
    """A garbage collection would run other lines in a step, where an interrupt is swallowed. What earlier tests left
    is collected first: an optimizer between its passes makes every first_step run a few lines more."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def worth(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small tensors, which are quick to test with, are exchanged too."""
    monkeypatch.setattr(storage_swap, "MIN_MEAN_NUMEL_CPU", 0)
