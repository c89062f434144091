"""What a run returns."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn


class Result:
    """A finished run.

    model: a copy of the user's model with the final global weights. history: one dict per round, as in metrics.jsonl.
    run_dir: where it was written, or None.
    """

    def __init__(
        self, model: nn.Module, history: list[dict[str, Any]], facts: Mapping[str, Any], run_dir: Path | None
    ) -> None:
        self.model, self.history, self.run_dir = model, history, run_dir
        self._facts = dict(facts)

    def summary(self) -> dict[str, Any]:
        """The run in numbers; accuracies in 0..1, None where nothing was measured.

        accuracy_last10: mean over the last ten evaluated rounds. rounds_to_target: completed rounds when the test accuracy first reached
        the target. seconds_per_round: median, evaluation included. megabytes: 1e6 bytes, both directions, all rounds.
        """
        return summary(self.history, self._facts)

    def __repr__(self) -> str:
        accuracy = self.summary()["accuracy_final"]
        return f"Result({self._facts['algorithm']}, {len(self.history)} rounds, test accuracy {accuracy})"


def summary(history: Sequence[Mapping[str, Any]], facts: Mapping[str, Any]) -> dict[str, Any]:
    """See `Result.summary`. facts: what does not come from the history."""
    evaluated = [r for r in history if r["test_accuracy"] is not None]
    accuracies = [r["test_accuracy"] for r in evaluated]
    last = evaluated[-1] if evaluated else {}
    target = facts["target"]
    reached = [r["round"] for r in evaluated if target is not None and r["test_accuracy"] >= target]
    losses = [r["test_loss"] for r in history if r["test_loss"] is not None]
    return {
        **{key: facts[key] for key in ("algorithm", "hyperparameters", "parameters")},
        "rounds": len(history),
        "accuracy_final": accuracies[-1] if accuracies else None,
        "accuracy_best": max(accuracies, default=None),
        "accuracy_last10": statistics.fmean(accuracies[-10:]) if accuracies else None,
        "test_loss_final": losses[-1] if losses else None,
        "client_accuracy_mean": last.get("client_accuracy_mean"),
        "client_accuracy_std": last.get("client_accuracy_std"),
        "validation": facts["validation"],
        "target": target,
        "rounds_to_target": min(reached, default=None),
        "seconds_per_round": statistics.median(r["seconds"] for r in history) if history else None,
        "megabytes": sum(r["megabytes_down"] + r["megabytes_up"] for r in history),
        "backprops": sum(r["backprops"] for r in history),
        "excluded": sum(len(r["excluded"]) for r in history),
        **{key: facts[key] for key in ("executor", "backend", "seed")},
    }
