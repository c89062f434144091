"""The records of a run for people's dashboards: a CSV file, TensorBoard, Weights & Biases, MLflow. Each needs its
package only when it is made."""

from __future__ import annotations

import csv
import importlib
import io
import json
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from fastsam.fed.callbacks.base import Callback, Record, RunView
from fastsam.fed.common.atomic_files import make_directory, write_bytes
from fastsam.fed.rundir.result import Result

_MAX_LENGTH = 500  # characters of a parameter's value: every MLflow server takes so many


def numbers(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a record. A list, such as the excluded clients, counts by its length."""
    flat = {key: len(value) if isinstance(value, list) else value for key, value in record.items()}
    return {key: float(v) for key, v in flat.items() if isinstance(v, (int, float)) and not isinstance(v, bool)}


class CSV(Callback):
    """Writes one line per round to a CSV file, with lists as JSON. A resumed run has all its rounds in it.

    Args:
        path: path of the file, which is overwritten. Its folders are made.
    """

    def __init__(self, path: str | PathLike[str]) -> None:
        self.path = Path(path)
        if self.path.is_dir():
            raise ValueError(f"path must be a file such as {self.path / 'rounds.csv'}, got a directory")
        self._columns: list[str] = []

    def on_start(self, run: RunView) -> None:
        """Begin the file."""
        make_directory(self.path.parent, "choose another path")
        self._write(run.history)

    def on_round(self, run: RunView, record: Record) -> None:
        """Add a line. A key that no earlier record had makes a new column."""
        if record.keys() <= {*self._columns}:
            with open(self.path, "a", newline="") as file:
                file.write(self._lines([record]))
        else:
            self._write(run.history)

    def _write(self, records: Sequence[Record]) -> None:
        self._columns = list(dict.fromkeys(key for record in records for key in record))
        head = ",".join(self._columns) + "\r\n" if self._columns else ""
        write_bytes(self.path, (head + self._lines(records)).encode())

    def _lines(self, records: Sequence[Record]) -> str:
        buffer = io.StringIO(newline="")
        rows = ({k: json.dumps(v) if isinstance(v, (list, dict)) else v for k, v in one.items()} for one in records)
        csv.DictWriter(buffer, self._columns).writerows(rows)
        return buffer.getvalue()


class TensorBoard(Callback):
    """The numbers of every round as TensorBoard's scalars, by round. Needs `tensorboard`.

    Args:
        directory: directory of the event files.
    """

    def __init__(self, directory: str | PathLike[str]) -> None:
        self.directory = Path(directory)
        self._library = _import_package("torch.utils.tensorboard", "tensorboard")
        self._writer: Any = None

    def on_start(self, run: RunView) -> None:
        """Open the writer. In a resumed run, TensorBoard drops the later rounds that were written before."""
        self._writer = self._library.SummaryWriter(self.directory, purge_step=run.round + 1 if run.round else None)

    def on_round(self, run: RunView, record: Record) -> None:
        """Write the numbers of a round."""
        for key, value in numbers(record).items():
            if key != "round":
                self._writer.add_scalar(key, value, record["round"])

    def on_end(self, run: RunView, result: Result | None) -> None:
        """Close the writer."""
        self._writer.close()


class WandB(Callback):
    """Logs the numbers of every round, the config and the summary to Weights & Biases. Needs `wandb`.

    To continue a resumed run, name it: `WandB(project="fed", id="mine", resume="allow")`.

    Args:
        **options: arguments of `wandb.init`.
    """

    def __init__(self, **options: Any) -> None:
        self.options = options
        self._library = _import_package("wandb", "wandb")
        self._run: Any = None

    def on_start(self, run: RunView) -> None:
        """Begin a run in Weights & Biases."""
        self._run = self._library.init(**{"config": run.config, **self.options})

    def on_round(self, run: RunView, record: Record) -> None:
        """Log a round, with its number as the step."""
        self._run.log(numbers(record), step=record["round"])

    def on_end(self, run: RunView, result: Result | None) -> None:
        """Write the summary and end the run there. It has failed there if this run has."""
        if result is not None:
            self._run.summary.update(result.summary())
        self._run.finish(exit_code=0 if run.error is None else 1)


class MLflow(Callback):
    """Logs the numbers of every round and the config to MLflow. Needs `mlflow` or `mlflow-skinny`.

    To continue a resumed run, name it: `MLflow(run_id=...)`.

    Args:
        experiment: name of the experiment, or None for the current one.
        **options: arguments of `mlflow.start_run`.
    """

    def __init__(self, experiment: str | None = None, **options: Any) -> None:
        self.experiment, self.options = experiment, options
        self._library = _import_package("mlflow", "mlflow")

    def on_start(self, run: RunView) -> None:
        """Begin a run in MLflow, with its parameters unless it continues an earlier one."""
        if self.experiment is not None:
            self._library.set_experiment(self.experiment)
        self._library.start_run(**self.options)
        if not run.round:
            self._library.log_params({key: str(value)[:_MAX_LENGTH] for key, value in run.config.items()})

    def on_round(self, run: RunView, record: Record) -> None:
        """Log a round, with its number as the step."""
        self._library.log_metrics(numbers(record), step=record["round"])

    def on_end(self, run: RunView, result: Result | None) -> None:
        """End the run in MLflow. It has failed there if this run has."""
        self._library.end_run("FINISHED" if run.error is None else "FAILED")


def _import_package(module: str, package: str) -> Any:
    """Import a module of a package. Raises ImportError with the command that installs it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(f"this callback needs the package {package}: pip install {package}") from error
