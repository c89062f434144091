"""Callbacks that follow the best value of a metric: early stopping, and saving the best model."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from fastsam.fed.callbacks.base import Callback, Record, RunView, Stop
from fastsam.fed.common.atomic_files import make_directory, write_bytes
from fastsam.fed.common.checks import choice, integer, nearest, number
from fastsam.fed.common.fingerprints import digest
from fastsam.fed.rundir.checkpoint import stored_model
from fastsam.fed.rundir.result import Result

log = logging.getLogger("fastsam.fed")
ELSEWHERE = "choose another path, or move the file away"
_DOWN, _UP = ("loss", "error", "perplexity"), ("accuracy", "f1", "auc")


class Best(Callback):
    """The best value of a metric so far.

    Attributes:
        value: best value, None before the first one.
        round: round of the best value.
        rounds_since_best: number of evaluations after it.
    """

    def __init__(self, metric: str, mode: str | None, min_delta: float = 0.0) -> None:
        if not isinstance(metric, str) or not metric:
            raise ValueError(f"metric must be a key of a round's record such as 'test_accuracy', got {metric!r}")
        self.metric, self.mode = metric, _mode(metric, mode)
        self.min_delta = number("min_delta", min_delta, at_least=0)
        self._begin()

    def _begin(self) -> None:
        self.value: float | None = None
        self.round = self.rounds_since_best = 0  # evaluations after the best one

    def take(self, record: Record) -> bool:
        """Return True if the record's value is the best so far. Raises ValueError if the record lacks the key."""
        if self.metric not in record:
            names = [key for key, value in record.items() if value is None or isinstance(value, (int, float))]
            hint = nearest(self.metric, names)
            raise ValueError(f"the records of this run have no {self.metric!r}{hint}; they have {', '.join(names)}")
        value = record[self.metric]
        if value is None:  # a round without evaluation
            return False
        gain = 0.0 if self.value is None else (value - self.value) * (1 if self.mode == "max" else -1)
        better = not math.isnan(value) and (self.value is None or gain > self.min_delta)
        if better:
            self.value, self.round, self.rounds_since_best = value, record["round"], 0
        else:
            self.rounds_since_best += 1
        return better

    def _take_history(self, run: RunView) -> None:
        """Take the records of the earlier rounds, as an uninterrupted run has them. They lack a metric that was added
        when the run was resumed."""
        for record in run.history:
            if self.metric in record and run.has_value(self.metric, record["round"]):
                self.take(record)

    def on_end(self, run: RunView, result: Result | None) -> None:
        """Log a warning if the metric had no value in any round."""
        if result is not None and run.round and self.value is None:
            log.warning("%s: %r had no value in any round", type(self).__name__, self.metric)


class EarlyStopping(Best):
    """Stops a run when `metric` has not improved in `patience` evaluations. A resumed run counts its earlier rounds.

    Args:
        metric: key of a round's record; rounds without a value do not count.
        patience: number of evaluations without an improvement.
        mode: "min" or "max", by default by the name (losses fall, accuracies rise).
        min_delta: least size of an improvement.
    """

    def __init__(
        self, metric: str = "test_loss", patience: int = 10, mode: str | None = None, min_delta: float = 0.0
    ) -> None:
        super().__init__(metric, mode, min_delta)
        self.patience = integer("patience", patience, at_least=1)

    def on_start(self, run: RunView) -> None:
        """Count the rounds so far. Raises Stop if they are enough."""
        self._begin()
        self._take_history(run)
        self._judge()

    def on_round(self, run: RunView, record: Record) -> None:
        """Raise Stop if there was no improvement for too long."""
        self.take(record)
        self._judge()

    def _judge(self) -> None:
        if self.rounds_since_best >= self.patience:
            best = "no number" if self.value is None else f"{self.value:.6g} of round {self.round}"
            raise Stop(f"{self.metric} has not improved on {best} in {self.rounds_since_best} evaluations")


class SaveBest(Best):
    """Keeps the global model of the round with the best `metric` in a file.

        model.load_state_dict(safetensors.torch.load_file(path))

    The file is replaced in one step. Its metadata have the round, the metric and its value, and tell runs apart.

    A resumed run continues with the value of its file. The same run from its start replaces the file. Any other file is
    refused before the first round, because it would be lost, or be taken for the best model of this run.

    Args:
        path: path of the file. Its folders are made.
        metric, mode: see `EarlyStopping`.
    """

    def __init__(self, path: str | PathLike[str], metric: str = "test_accuracy", mode: str | None = None) -> None:
        super().__init__(metric, mode)
        self.path = Path(path)
        if self.path.is_dir():
            raise ValueError(f"path must be a file such as {self.path / 'best.safetensors'}, got a directory")

    def on_start(self, run: RunView) -> None:
        """Take the value of the file, if this run wrote it. Raises FileExistsError for a file of something else."""
        make_directory(self.path.parent, "choose another path")
        self._begin()
        self._start = digest(run.model()) if run.round == 0 else ""  # a resumed run takes it from the file
        if self.path.exists():
            self._take_file(run, _metadata(self.path))

    def _take_file(self, run: RunView, facts: Mapping[str, str]) -> None:
        if facts["metric"] != self.metric:
            raise FileExistsError(f"{self.path} has the model with the best {facts['metric']}; {ELSEWHERE}")
        value, round = float(facts["value"]), int(facts["round"])
        key = "first_loss" if run.round else "start"
        if facts[key] != self._facts(run)[key] or facts["run"] != run.fingerprint:
            raise FileExistsError(
                f"{self.path} has the model of another run ({self.metric} {value:.6g} in round {round}); {ELSEWHERE}"
            )
        if run.round == 0:
            return
        self.value, self.round, self._start = value, round, facts["start"]
        self.rounds_since_best = sum(record.get(self.metric) is not None for record in run.history[round:])

    def on_round(self, run: RunView, record: Record) -> None:
        """Write the model if it is the best so far."""
        if self.take(record):
            write_bytes(self.path, stored_model(run.model(), self._facts(run)))

    def _facts(self, run: RunView) -> dict[str, str]:
        """Return the metadata of the file. A run with other start weights has the same fingerprint, so there are the
        hash of the weights, for a run that begins, and the first loss, for a run that is resumed."""
        facts: dict[str, Any] = {"round": self.round, "metric": self.metric, "value": self.value}
        facts |= {"run": run.fingerprint, "start": self._start}
        facts["first_loss"] = run.history[0]["train_loss"] if run.round else ""
        return {key: str(value) for key, value in facts.items()}


def _metadata(path: Path) -> dict[str, str]:
    """Return the metadata of a file of `SaveBest`. Raises FileExistsError for any other file."""
    try:
        with safe_open(path, "pt") as file:
            facts = file.metadata() or {}
    except (OSError, SafetensorError):
        facts = {}
    if not {"round", "metric", "value", "run", "start", "first_loss"} <= facts.keys():
        raise FileExistsError(f"{path} is not a file of SaveBest; {ELSEWHERE}")
    return facts


def _mode(metric: str, mode: str | None) -> str:
    if mode is not None:
        return choice("mode", mode, ("min", "max"))
    for words, mode_name in ((_DOWN, "min"), (_UP, "max")):
        if any(word in metric for word in words):
            return mode_name
    raise ValueError(f"mode must be 'min' or 'max': the name {metric!r} does not say which of its values is good")
