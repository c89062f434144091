"""Callbacks of a run: the base class, loggers, early stopping, and the best model.

callbacks = [fed.callbacks.CSV("rounds.csv"), fed.callbacks.EarlyStopping("test_loss", patience=5)]
fed.run(model, data, fed.FedSAM(), rounds=50, callbacks=callbacks)
"""

from __future__ import annotations

from fastsam.fed.callbacks.base import Callback, CallbackError, RunView, Stop
from fastsam.fed.callbacks.best import EarlyStopping, SaveBest
from fastsam.fed.callbacks.logs import CSV, MLflow, TensorBoard, WandB

__all__ = [
    "CSV",
    "Callback",
    "CallbackError",
    "EarlyStopping",
    "MLflow",
    "RunView",
    "SaveBest",
    "Stop",
    "TensorBoard",
    "WandB",
]
