"""The loggers with the libraries themselves, on files of this machine; and records as a data frame."""

from pathlib import Path

import pytest

from fastsam import fed
from tests.helpers.fed_rundir import start
from tests.helpers.libraries import library

pandas, wandb, mlflow = library("pandas"), library("wandb"), library("mlflow")
library("tensorboard")


def test_tensorboard(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    result = start(tmp_path / "run", rounds=3, callbacks=[fed.callbacks.TensorBoard(tmp_path / "events")])
    events = EventAccumulator(str(tmp_path / "events"))
    events.Reload()
    scalars = events.Scalars("train_loss")
    assert [event.step for event in scalars] == [1, 2, 3]
    assert [event.value for event in scalars] == pytest.approx([r["train_loss"] for r in result.history], rel=1e-6)


def test_the_history_as_a_data_frame(tmp_path: Path) -> None:
    result = start(tmp_path / "run", rounds=3, eval_every=3)
    frame = result.to_pandas()
    assert list(frame.index) == [1, 2, 3] and frame["train_loss"].tolist() == [r["train_loss"] for r in result.history]
    assert frame["test_loss"].isna().tolist() == [True, True, False]
    assert fed.Result(result.model, [], {}, None, None).to_pandas().empty


def test_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    callback = fed.callbacks.WandB(project="fed", dir=str(tmp_path))
    start(tmp_path / "run", rounds=2, callbacks=[callback])
    assert list(tmp_path.glob("wandb/offline-run-*/run-*.wandb"))


def test_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # the databases that it prefers need more packages
    mlflow.set_tracking_uri(f"file://{tmp_path / 'mlflow'}")
    result = start(tmp_path / "run", rounds=3, callbacks=[fed.callbacks.MLflow("fed", run_name="one")])
    client = mlflow.MlflowClient()
    (run,) = client.search_runs([client.get_experiment_by_name("fed").experiment_id])
    assert run.info.status == "FINISHED" and run.data.params["algorithm"] == "MoFedSAM"
    history = client.get_metric_history(run.info.run_id, "train_loss")
    assert [metric.value for metric in history] == [record["train_loss"] for record in result.history]
