"""The result of a run."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from fastsam.extras import install_command
from fastsam.fed.measures import NAMES

if TYPE_CHECKING:
    import pandas
    from matplotlib.axes import Axes

History = Sequence[Mapping[str, Any]]
CLIENTS = (*(f"client_accuracy_{k}" for k in ("mean", "std", "min", "max")), "client_worst", "client_best")


class Result:
    """A finished run.

    Attributes:
        model: a copy of the user's model with the final global weights.
        history: one dict per round, as in metrics.jsonl.
        run_dir: the run directory, or None.
        settings: the options of the run.
        client_accuracies: per-client accuracy at the end, a list by client id, None for a client without test samples;
            None if the run has no accuracies over clients. Clients with own models are tested with these models.
    """

    def __init__(
        self,
        model: nn.Module,
        history: list[dict[str, Any]],
        facts: Mapping[str, Any],
        run_dir: Path | None,
        settings: Any,
        client_model: Callable[[int], nn.Module] | None = None,
        client_accuracies: list[float | None] | None = None,
    ) -> None:
        self.model, self.history, self.run_dir, self.settings = model, history, run_dir, settings
        self.client_accuracies = client_accuracies
        self._facts, self._client_model = dict(facts), client_model

    def summary(self) -> dict[str, Any]:
        """Return the run in numbers. Accuracies are in 0..1; None if nothing was measured.

        stopped: reason of a callback to end the run early.
        train_accuracy: without a test set, the final model's accuracy on the training samples of all clients.
        accuracy_last10: mean over the last ten evaluated rounds.
        client_*: over the clients, in the last evaluated round; client_worst and client_best are client ids.
        rounds_to_target: completed rounds when the test accuracy first reached the target.
        seconds_to_target, megabytes_to_target: sums over these rounds, the seconds without evaluation.
        seconds_per_round, seconds_training: medians with and without evaluation and measures.
        megabytes: 1e6 bytes, both directions, all rounds.
        privacy: with noise the neighbouring sets (`neighbours`), epsilon at the end, and delta; else None.
        measures: values of the last measured round.
        metrics: values of the last evaluated round, over the test set and over clients.
        state_megabytes: states of server and clients at the end.
        client_vectors: largest number of vectors of the size of the weights that a client keeps.
        client_state: place of the clients' states.
        client_megabytes: weights, one gradient, and further vectors of a local step.
        """
        return summary(self.history, self._facts)

    @property
    def has_client_models(self) -> bool:
        """True if parameters or models stay with the clients, so that `client_model` returns them."""
        return self._client_model is not None

    def client_model(self, client: int) -> nn.Module:
        """Return a copy of the client's own model.

        It has the client's own parameters and buffers (`local_parameters`, FedBN, FedRep), or is wholly its own (Ditto,
        pFedMe, APFL).

        Raises:
            ValueError: the clients of the run have no own models, or the run does not have this client.
        """
        if self._client_model is None:
            raise ValueError(
                "clients have their own models if parameters stay with them: fed.run(..., local_parameters='head.*')"
            )
        return self._client_model(client)

    def to_pandas(self) -> pandas.DataFrame:
        """Return the history as a data frame with a row per round, whose number is the index. Needs pandas."""
        try:
            import pandas
        except ImportError as error:
            raise ImportError("to_pandas() needs pandas (pip install pandas); the records are in .history") from error
        return pandas.DataFrame(self.history).set_index("round") if self.history else pandas.DataFrame()

    def plot(self, ax: Axes | None = None) -> Axes:
        """Draw the test accuracy by round, or without a test accuracy the clients' training loss. Needs matplotlib.

            >>> ax = fed.run(model, data, fed.FedAvg(), rounds=50).plot()
            >>> fed.run(model, data, fed.FedSAM(), rounds=50).plot(ax).figure.savefig("runs.png")

        Args:
            ax: axes for the line, such as the axes of another result; None: a new figure.

        Returns:
            the axes, with a line whose label is the algorithm's name.
        """
        try:
            from matplotlib import pyplot
        except ImportError as error:
            raise ImportError(f"plot() needs matplotlib: {install_command('lab')}") from error
        key, name = "test_accuracy", "test accuracy"
        if all(record[key] is None for record in self.history):
            key, name = "train_loss", "training loss of the active clients"
        points = [(record["round"], record[key]) for record in self.history if record[key] is not None]
        axes = pyplot.subplots()[1] if ax is None else ax
        axes.plot(*zip(*points, strict=True) if points else ((), ()), label=self._facts["algorithm"])
        axes.set(xlabel="round", ylabel=name)
        axes.legend()
        return axes

    def __repr__(self) -> str:
        summary = self.summary()
        keys = {"test accuracy": "accuracy_final", "train accuracy": "train_accuracy", "test loss": "test_loss_final"}
        values = [f", {name} {summary[key]}" for name, key in keys.items() if summary[key] is not None]
        return f"Result({self._facts['algorithm']}, {len(self.history)} rounds{''.join(values[:1])})"


def summary(history: Sequence[Mapping[str, Any]], facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the summary (see `Result.summary`). `facts` are values that are not in the history."""
    evaluations = [r for r in history if r["test_loss"] is not None]
    accuracies = [r["test_accuracy"] for r in evaluations if r["test_accuracy"] is not None]
    last = evaluations[-1] if evaluations else {}
    losses = [r["test_loss"] for r in history if r["test_loss"] is not None]
    return {
        **{key: facts[key] for key in ("algorithm", "hyperparameters", "parameters")},
        "rounds": len(history),
        "stopped": facts.get("stopped"),
        "accuracy_final": accuracies[-1] if accuracies else None,
        "accuracy_best": max(accuracies, default=None),
        "accuracy_last10": statistics.fmean(accuracies[-10:]) if accuracies else None,
        "train_accuracy": facts.get("train_accuracy"),
        "test_loss_final": losses[-1] if losses else None,
        **{key: last.get(key) for key in CLIENTS},
        "validation": facts["validation"],
        "target": facts["target"],
        **to_target(history, facts["target"]),
        "seconds_per_round": statistics.median(r["seconds"] for r in history) if history else None,
        "seconds_training": statistics.median(r["seconds_training"] for r in history) if history else None,
        "megabytes": sum(map(_bytes_of, history)),
        "backprops": sum(r["backprops"] for r in history),
        "excluded": sum(len(r["excluded"]) for r in history),
        "privacy": None
        if not facts.get("privacy")
        else facts["privacy"] | {"epsilon": history[-1].get("epsilon") if history else 0.0},
        "measures": _last_measures(history),
        "metrics": {key: last.get(key) for key in _metric_keys(facts["metrics"])},
        **{
            key: facts[key]
            for key in (
                "state_megabytes",
                "client_vectors",
                "client_state",
                "client_megabytes",
                "executor",
                "backend",
                "seed",
            )
        },
    }


def to_target(history: History, target: float | None) -> dict[str, Any]:
    """Return rounds, seconds and megabytes until the accuracy `target` (0..1) was reached, or None for each."""
    evaluations = [r for r in history if r["test_accuracy"] is not None]
    rounds = [r["round"] for r in evaluations if target is not None and r["test_accuracy"] >= target]
    first = min(rounds, default=None)
    first_records = [] if first is None else [r for r in history if r["round"] <= first]
    return {
        "rounds_to_target": first,
        "seconds_to_target": sum(r["seconds_training"] for r in first_records) if first_records else None,
        "megabytes_to_target": sum(map(_bytes_of, first_records)) if first_records else None,
    }


def _bytes_of(record: Mapping[str, Any]) -> float:
    return record["megabytes_down"] + record["megabytes_up"]


def _metric_keys(names: Sequence[str]) -> list[str]:
    return [key for n in names for key in (f"test_{n}", f"client_{n}_mean", f"client_{n}_std")]


def _last_measures(history: History) -> dict[str, float]:
    """Return the last value of each measure that has one."""
    keys = [key for names in NAMES.values() for key in names]
    columns = {key: [r[key] for r in history if r.get(key) is not None] for key in keys}
    return {key: values[-1] for key, values in columns.items() if values}
