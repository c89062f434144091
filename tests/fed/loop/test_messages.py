"""What is easily got wrong in a call of `fed.run` is told in words, before the first round."""

from __future__ import annotations

from typing import Any

import pytest

from fastsam import fed
from tests.helpers.fed_input import X, Y, start


def test_a_run_without_a_test_set(caplog: pytest.LogCaptureFixture) -> None:
    start()
    assert "there is no test set: the records' test_loss and test_accuracy are None. Pass test=(x, y)" in caplog.text
    caplog.clear()
    start(test=(X, Y))
    assert "there is no test set" not in caplog.text


@pytest.mark.parametrize(
    "callback", [fed.callbacks.EarlyStopping("test_f1"), fed.callbacks.EarlyStopping("test_lossy")], ids=["f1", "typo"]
)
def test_a_metric_that_no_record_has(callback: Any) -> None:
    records: list[Any] = []
    with pytest.raises(fed.CallbackError, match=f"after 0 rounds.* have no '{callback.metric}'"):
        start(test=(X, Y), callbacks=[callback], progress=records.append)
    assert records == []
