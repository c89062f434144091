"""Callbacks: early stopping and the best model, compared with a count from the records."""

import logging
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch

from fastsam import fed
from fastsam.fed.callbacks import EarlyStopping, SaveBest
from tests.helpers import oracle
from tests.helpers.fed_rundir import Alarm, start
from tests.helpers.fed_runs import same_bits


class View:
    """A run with these values of a metric so far."""

    keys = None

    def __init__(self, *values: float | None) -> None:
        self.history = [{"round": i + 1, "score": value} for i, value in enumerate(values)]
        self.round = len(values)

    def has_value(self, metric: str, num_rounds: int) -> bool:
        return True


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
    ("values", "options", "last_round"),
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
def test_it_stops_when_patience_is_over(values, options, last_round):
    assert stopped_after(values, **options) == last_round


def test_what_it_says():
    stopping = EarlyStopping("score", patience=2, mode="min")
    with pytest.raises(fed.Stop, match="score has not improved on 0.5 of round 1 in 2 evaluations"):
        stopping.on_start(View(0.5, 0.7, 0.6))


def test_a_run_interrupted_and_resumed_stops_in_the_same_round(tmp_path):
    """Counters are resumed, and a stopped run stays stopped."""

    def stopping() -> EarlyStopping:
        return EarlyStopping("train_loss", patience=3, mode="max")  # which falls

    full_run = start(tmp_path / "whole", rounds=30, callbacks=[stopping()])
    with pytest.raises(KeyboardInterrupt):
        start(tmp_path / "run", rounds=30, callbacks=[stopping(), Alarm(2, KeyboardInterrupt())])
    resumed_result = start(tmp_path / "run", rounds=30, callbacks=[stopping()], resume=True)
    repeat = start(tmp_path / "run", rounds=30, callbacks=[stopping()], resume=True)
    assert 3 < len(full_run.history) < 30
    for run in (resumed_result, repeat):
        assert same_bits(run.model, full_run.model) and run.summary()["stopped"] == full_run.summary()["stopped"]


def test_a_forced_last_evaluation_does_not_count_when_the_run_goes_on(tmp_path):
    """A run of four rounds evaluates its last one. An uninterrupted run has no such evaluation."""
    options = {"eval_every": 3, "lr": 1e-3}

    def callbacks(name: str, metric: str = "test_loss") -> list[Any]:
        return [EarlyStopping(metric, 2, "max"), SaveBest(tmp_path / name, metric, "max")]  # the loss falls

    whole_callbacks, part_callbacks = callbacks("whole"), callbacks("part")
    whole = start(tmp_path / "whole run", rounds=20, callbacks=whole_callbacks, **options)
    first = start(tmp_path / "run", rounds=4, callbacks=callbacks("part"), **options)
    assert whole.history[-1]["round"] == 9 and first.history[3]["test_loss"] is not None
    assert whole.history[3]["test_loss"] is None
    resumed = start(tmp_path / "run", rounds=20, resume=True, callbacks=part_callbacks, **options)
    assert len(resumed.history) == 9 and resumed.summary()["stopped"] == whole.summary()["stopped"]
    assert [one.round for one in part_callbacks] == [one.round for one in whole_callbacks] == [3, 3]
    again = start(tmp_path / "again", rounds=4, callbacks=[EarlyStopping(patience=1, mode="max")], **options)
    assert again.summary()["stopped"] is not None, "in a run of four rounds it counts"
    trained = [EarlyStopping("train_loss", 4, "max")]  # a value of every round
    options["participation"] = 1.0  # the loss falls
    start(tmp_path / "trained", rounds=4, callbacks=trained, **options)
    start(tmp_path / "trained", rounds=20, resume=True, callbacks=trained, **options)
    assert trained[0].rounds_since_best == 4 and trained[0].round == 1


def test_the_best_model_is_that_of_its_round(tmp_path):
    class Models(fed.Callback):
        def __init__(self):
            self.results = {}

        def on_round(self, run, record):
            self.results[record["round"]] = run.model()

    models, path = Models(), tmp_path / "deep" / "best.safetensors"
    best = SaveBest(path, "test_loss")
    result = start(tmp_path / "run", rounds=8, lr=2.0, callbacks=[models, best])
    losses = [record["test_loss"] for record in result.history]
    best_round = 1 + losses.index(min(losses))
    assert best_round < 8, "the last round is the best: this shows nothing"
    model = models.results[8]
    model.load_state_dict(safetensors.torch.load_file(path))
    assert same_bits(model, models.results[best_round]) and (best.round, best.value) == (best_round, min(losses))
    with safetensors.safe_open(path, "pt") as file:
        facts = {"round": str(best_round), "metric": "test_loss", "value": str(min(losses))}
        assert facts.items() <= file.metadata().items()
    # A resumed run knows the best of before; without the file it begins anew.
    old_bytes = path.read_bytes()
    best = SaveBest(path, "test_loss")
    start(tmp_path / "run", rounds=9, lr=2.0, resume=True, callbacks=[best])
    assert (best.round, best.value, best.rounds_since_best) == (best_round, min(losses), 9 - best_round)
    worse = min(losses) < start(tmp_path / "run", rounds=9, lr=2.0, resume=True).history[8]["test_loss"]
    assert worse and path.read_bytes() == old_bytes
    path.unlink()
    for rounds in (10, 11):
        best = SaveBest(path, "test_loss")
        start(tmp_path / "run", rounds=rounds, lr=2.0, resume=True, callbacks=[best])
        with safetensors.safe_open(path, "pt") as file:
            assert best.round == int(file.metadata()["round"]) >= 10


OTHER_RUNS: dict[str, dict[str, Any]] = {
    "options": {"lr": 0.05},
    "data": {"clients": oracle.ragged_clients(sizes=(8, 9, 10, 11, 12))},
    "start": {"model": oracle.smooth_model(seed=1)},
    "algorithm": {"algorithm": fed.FedAvg()},
}


@pytest.mark.parametrize("options", OTHER_RUNS.values(), ids=OTHER_RUNS)
def test_the_best_model_of_another_run_is_neither_replaced_nor_kept_for_this_one(options, tmp_path):
    path = tmp_path / "best.safetensors"
    first = SaveBest(path, "test_loss")
    start(tmp_path / "first", callbacks=[first])
    old_bytes = path.read_bytes()
    words = f"best.safetensors has the model of another run.*round {first.round}.*choose another path"
    start(tmp_path / "second", rounds=2, **options)
    for more in ({}, {"resume": True}):  # a new run, and a resumed run
        directory = tmp_path / ("second" if more else "third")
        with pytest.raises(fed.CallbackError, match=words):
            start(directory, callbacks=[SaveBest(path, "test_loss")], **more, **options)
    assert path.read_bytes() == old_bytes


def test_the_best_model_of_the_same_run_begun_anew_is_replaced(tmp_path):
    path = tmp_path / "best.safetensors"
    start(tmp_path / "first", callbacks=[SaveBest(path, "test_loss")])
    best = SaveBest(path, "test_loss")
    start(tmp_path / "second", callbacks=[best])
    assert best.value is not None
    with pytest.raises(fed.CallbackError, match="best.safetensors has the model with the best test_loss"):
        start(tmp_path / "third", callbacks=[SaveBest(path, "train_loss")])
    path.write_text("of another program")
    with pytest.raises(fed.CallbackError, match="best.safetensors is not a file of SaveBest"):
        start(tmp_path / "fourth", callbacks=[SaveBest(path, "test_loss")])


def test_the_best_model_of_rounds_after_the_last_checkpoint_is_kept(tmp_path):
    """A kill loses the rounds after the checkpoint, and the file is ahead of the records."""
    path = tmp_path / "best.safetensors"
    options = {"participation": 1.0}  # the loss falls
    start(tmp_path / "killed", rounds=2, **options)
    start(tmp_path / "whole", rounds=4, callbacks=[SaveBest(path, "train_loss")], **options)
    file = path.stat()
    best = SaveBest(path, "train_loss")
    start(tmp_path / "killed", rounds=4, resume=True, callbacks=[best], **options)
    assert best.round == 4 and path.stat().st_mtime_ns == file.st_mtime_ns


def test_a_metric_that_was_added_at_resume_counts_from_there(tmp_path):
    start(tmp_path / "run", rounds=3)
    path, options = tmp_path / "best.safetensors", {"metrics": {"f1": lambda outputs, labels: 0.5}, "resume": True}
    stopping, best = EarlyStopping("test_f1", patience=2), SaveBest(path, "test_f1")
    result = start(tmp_path / "run", rounds=9, callbacks=[stopping, best], **options)
    assert len(result.history) == 6 and stopping.round == best.round == 4
    with pytest.raises(fed.CallbackError, match="no 'test_f2' .did you mean 'test_f1'"):
        start(tmp_path / "run", rounds=9, callbacks=[EarlyStopping("test_f2", mode="max")], **options)


def test_a_metric_that_is_not_there(tmp_path, caplog):
    with pytest.raises(fed.CallbackError, match="no 'test_acuracy' .did you mean 'test_accuracy'"):
        start(tmp_path / "run", callbacks=[EarlyStopping("test_acuracy", mode="max")])
    with caplog.at_level(logging.WARNING, "fastsam.fed"):
        fed.run(
            torch.nn.Linear(2, 2), [(torch.ones(2, 2), torch.tensor([0, 1]))], fed.FedAvg(), rounds=1,
            callbacks=[EarlyStopping()],
        )  # fmt: skip
    assert "EarlyStopping: 'test_loss' had no value in any round" in caplog.text
