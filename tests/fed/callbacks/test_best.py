"""Early stopping and the best model, beside what a person would count from the records."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch

from fastsam import fed
from fastsam.fed.callbacks import EarlyStopping, SaveBest
from tests.helpers.fed_rundir import start
from tests.helpers.fed_runs import same_bits


class View:
    """A run with these values of a metric so far."""

    keys = None

    def __init__(self, *values: float | None) -> None:
        self.history = [{"round": i + 1, "score": value} for i, value in enumerate(values)]
        self.round = len(values)


def stopped_after(values: list[float | None], **options: Any) -> int | None:
    """The round in which it stops a run with these values."""
    stopping = EarlyStopping("score", **options)
    stopping.on_start(View())
    for record in View(*values).history:
        try:
            stopping.on_round(View(), record)
        except fed.Stop:
            return record["round"]
    return None


@pytest.mark.parametrize(
    ("values", "options", "stopped"),
    [
        ([3, 2, 1, 1, 1, 1], {"mode": "min", "patience": 2}, 5),
        ([1, 2, 3, 3, 3, 3], {"mode": "max", "patience": 3}, 6),
        ([1, 2, 3], {"mode": "min", "patience": 2}, 3),
        (
            [3, None, 4, None, 2, 5, None, 5],
            {"mode": "min", "patience": 2},
            8,
        ),  # rounds without evaluation do not count
        ([1.0, 1.05, 1.1, 1.15], {"mode": "max", "patience": 2, "min_delta": 0.2}, 3),
        ([1.0, 1.1, 1.25, 1.3], {"mode": "max", "patience": 2, "min_delta": 0.2}, None),
        ([float("nan"), float("nan"), 1.0], {"mode": "min", "patience": 2}, 2),
        ([2.0, float("nan"), 1.0, float("nan")], {"mode": "min", "patience": 2}, None),
    ],
)
def test_it_stops_when_patience_is_over(values, options, stopped):
    assert stopped_after(values, **options) == stopped


def test_what_it_says():
    stopping = EarlyStopping("score", patience=2, mode="min")
    with pytest.raises(fed.Stop, match="score has not improved on 0.5 of round 1 in 2 evaluations"):
        stopping.on_start(View(0.5, 0.7, 0.6))


def test_a_run_interrupted_and_resumed_stops_in_the_same_round(tmp_path):
    """What was counted before is counted again; a run that was stopped stays stopped."""

    class Interrupts(fed.Callback):
        def on_round(self, run, record):
            if record["round"] == 2:
                raise KeyboardInterrupt

    def stopping() -> EarlyStopping:
        return EarlyStopping("train_loss", patience=3, mode="max")  # which falls

    whole = start(tmp_path / "whole", rounds=30, callbacks=[stopping()])
    with pytest.raises(KeyboardInterrupt):
        start(tmp_path / "run", rounds=30, callbacks=[stopping(), Interrupts()])
    resumed = start(tmp_path / "run", rounds=30, callbacks=[stopping()], resume=True)
    again = start(tmp_path / "run", rounds=30, callbacks=[stopping()], resume=True)
    assert 3 < len(whole.history) < 30
    for one in (resumed, again):
        assert same_bits(one.model, whole.model) and one.summary()["stopped"] == whole.summary()["stopped"]


def test_the_best_model_is_that_of_its_round(tmp_path):
    class Models(fed.Callback):
        def __init__(self):
            self.found = {}

        def on_round(self, run, record):
            self.found[record["round"]] = run.model()

    models, path = Models(), tmp_path / "deep" / "best.safetensors"
    best = SaveBest(path, "test_loss")
    result = start(tmp_path / "run", rounds=8, lr=2.0, callbacks=[models, best])
    losses = [record["test_loss"] for record in result.history]
    right = 1 + losses.index(min(losses))
    assert right < 8, "the last round is the best: this shows nothing"
    model = models.found[8]
    model.load_state_dict(safetensors.torch.load_file(path))
    assert same_bits(model, models.found[right]) and (best.round, best.value) == (right, min(losses))
    with safetensors.safe_open(path, "pt") as file:
        assert file.metadata() == {"round": str(right), "metric": "test_loss", "value": str(min(losses))}
    # A resumed run knows the best of before; without the file it begins anew.
    before = path.read_bytes()
    start(tmp_path / "run", rounds=9, lr=2.0, resume=True, callbacks=[SaveBest(path, "test_loss")])
    worse = min(losses) < start(tmp_path / "run", rounds=9, lr=2.0, resume=True).history[8]["test_loss"]
    assert worse and path.read_bytes() == before
    path.unlink()
    start(tmp_path / "run", rounds=10, lr=2.0, resume=True, callbacks=[SaveBest(path, "test_loss")])
    assert path.is_file()


def test_a_metric_that_is_not_there(tmp_path, caplog):
    with pytest.raises(
        fed.CallbackError, match="records of this run have no 'test_acuracy' .did you mean 'test_accuracy'"
    ):
        start(tmp_path / "run", callbacks=[EarlyStopping("test_acuracy", mode="max")])
    with caplog.at_level(logging.WARNING, "fastsam.fed"):
        fed.run(
            torch.nn.Linear(2, 2),
            [(torch.ones(2, 2), torch.tensor([0, 1]))],
            fed.FedAvg(),
            rounds=1,
            callbacks=[EarlyStopping()],
        )
    assert "EarlyStopping: 'test_loss' had no value in any round" in caplog.text
