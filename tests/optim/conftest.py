"""Fixtures that tests of several modules of the optimizer share."""

import gc
from collections.abc import Iterator

import pytest

from fastsam.optim import storage_swap


@pytest.fixture
def no_collection() -> Iterator[None]:
    """Prevent garbage collections, whose lines would run in a step, where an interrupt is swallowed.

    Garbage of earlier tests is collected first, because an optimizer between its passes adds lines to every first_step.
    """
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def small_exchanges(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the optimizer exchange small tensors too, which are quick to test with."""
    monkeypatch.setattr(storage_swap, "MIN_MEAN_NUMEL_CPU", 0)
