"""What a run returns."""

from __future__ import annotations

import sys

import pytest
from torch import nn

from fastsam import fed


def test_a_data_frame_needs_pandas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(
        ImportError, match=r"to_pandas\(\) needs pandas .pip install pandas.; the records are in .history"
    ):
        fed.Result(nn.Linear(1, 1), [{"round": 1}], {}, None, None).to_pandas()
