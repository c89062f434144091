"""What is easily got wrong in a call of `fed.run` is told in words, before the first round."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from fastsam import fed
from tests.helpers.fed_input import X, Y, start


@pytest.mark.parametrize(
    ("option", "meant"), [("learning_rate", "lr"), ("rouns", "rounds"), ("batchsize", "batch_size")]
)
def test_an_option_that_run_does_not_have(option: str, meant: str) -> None:
    with pytest.raises(TypeError, match=rf"run\(\) has no option '{option}' \(did you mean '{meant}'\?\)"):
        start(**{option: 1})


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


class OnlyTensor(fed.Algorithm):
    def local_step(self, server: Any, client: Any, round: Any) -> fed.LocalStep:
        return fed.LocalStep(only=torch.tensor([0]))  # type: ignore[arg-type]


class Flat(fed.Algorithm):
    own_models = True

    def init_client(self, server: Any) -> Any:
        return {"v": server["w"]}

    def own_model(self, server: Any, client: Any) -> Any:
        return client["v"][0]


@pytest.mark.parametrize(
    ("algorithm", "words"),
    [
        (OnlyTensor(), "only must be a tuple of places.* got Tensor"),
        (Flat(), r"own_model must return the weights of one client, torch.float32 \[\d+\].* Got torch.float32 \[\]"),
    ],
    ids=["only", "own_model"],
)
def test_a_wrong_value_of_an_own_algorithm(algorithm: fed.Algorithm, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        start(algorithm=algorithm)


@pytest.mark.parametrize("tree", [False, True], ids=["pairs", "trees"])
def test_masked_arrays(tree: bool) -> None:
    masked = np.ma.masked_array(X.numpy(), mask=X.numpy() > 1)
    with pytest.raises(ValueError, match="is a masked array of numpy, and training would read what is masked"):
        start(clients=[((masked,), Y) if tree else (masked, Y)])
