"""Fixtures that tests of several modules of the optimizer share."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from fastsam.optim import exclusive


@pytest.fixture
def no_collection() -> Iterator[None]:
    """A garbage collection would run other lines in a step, where an interrupt is swallowed."""
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def worth(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small tensors, which are quick to test with, are exchanged too."""
    monkeypatch.setattr(exclusive, "WORTH", 0)
