"""What tests of several modules of the optimizer share."""

from __future__ import annotations

import pytest

from fastsam.optim import exclusive


@pytest.fixture
def worth(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small tensors, which are quick to test with, are exchanged too."""
    monkeypatch.setattr(exclusive, "WORTH", 0)
