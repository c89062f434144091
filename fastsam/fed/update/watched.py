"""A step around another one: rows are copied before it, with their perturbation, for measures along the path."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from fastsam.fed.update.gradients import Gradients
from fastsam.fed.update.passes import Objective, Passes
from fastsam.fed.update.results import Snapshot
from fastsam.fed.update.rows import Rows
from fastsam.fed.update.steps import Step

KeptRow = tuple[int, dict[int, Snapshot], int]  # a row: its index, the client's copies, and the number of the step


def take_step(step: Step, rows: Rows, passes: Passes, kept: Sequence[KeptRow]) -> Tensor:
    """Take a step, and copy the rows `kept` before it. Return the losses."""
    w, eps = step.unperturbed(rows)
    for i, snapshots, k in kept:
        snapshots[k] = Snapshot(w[i].clone(), None if eps is None else eps[i].clone())
    return step(rows, _WatchedPasses(passes, rows, kept))


class _WatchedPasses:
    """Passes that add the perturbation of their weights to the copies of rows."""

    def __init__(self, passes: Passes, rows: Rows, kept: Sequence[KeptRow]) -> None:
        self._passes, self._rows, self._kept = passes, rows, kept
        self.first, self.all, self.outputs_of = passes.first, passes.all, passes.outputs_of

    def __call__(self, objective: Objective | None = None, *operands: Tensor) -> tuple[Tensor, Gradients]:
        if self._rows.is_moved:
            for i, snapshots, k in self._kept:
                snapshots[k] = Snapshot(snapshots[k].w, self._rows.z[i] - snapshots[k].w)
        return self._passes(objective, *operands)
