"""The passes of stacked clients, for their steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from fastsam.fed.clients.samples import Tensors
from fastsam.fed.executors.client_block import ClientBlock, Group, tasks_of
from fastsam.fed.executors.extra_models import TEACHER_NEEDS
from fastsam.fed.executors.stacked import StackedPasses
from fastsam.fed.executors.task import Task, WeightedBatch
from fastsam.fed.update.gradients import Gradients
from fastsam.fed.update.passes import Objective, PassesOfBeginning, PassesOfStep
from fastsam.fed.update.rows import Rows


class Runner(Protocol):
    """The executor that runs the passes."""

    rows: Rows
    passes: StackedPasses

    def run(
        self,
        groups: Sequence[Group],
        rows: Rows,
        batches: Sequence[Tensors],
        objective: Objective | None,
        *operands: Tensor,
    ) -> tuple[Tensor, Gradients]:
        """Run a pass of each group, and return the losses and gradients of all rows."""

    def mean_gradients(
        self,
        blocks: Sequence[ClientBlock],
        batches_of: Callable[[Task], Iterator[WeightedBatch]],
        norms: Tensor | None = None,
    ) -> Tensor:
        """Return each client's mean gradient over batches before its first step, and add the norms to `norms`."""


class StackedStep(PassesOfStep):
    """The passes of one step of some groups."""

    def __init__(self, executor: Runner, groups: Sequence[Group], rows: Rows, batches: Sequence[Tensors]) -> None:
        self._executor, self._groups, self._rows, self._batches = executor, groups, rows, batches
        self.count, self.is_plain = 0, True

    def __call__(self, objective: Objective | None = None, *operands: Tensor) -> tuple[Tensor, Gradients]:
        self.count, self.is_plain = self.count + 1, self.is_plain and objective is None
        return self._executor.run(self._groups, self._rows, self._batches, objective, *operands)

    def outputs_of(self, w: Tensor) -> Tensor:
        """See `Passes.outputs_of`."""
        if self._groups[0][0].step.start is not None and w.data_ptr() != self._rows["start"].data_ptr():
            raise ValueError(TEACHER_NEEDS)
        self.is_plain = False
        (batch,) = self._batches
        return self._executor.passes.outputs_of(w, batch)


class StackedBeginning(PassesOfBeginning):
    """The passes of some blocks before their first step."""

    def __init__(self, executor: Runner, blocks: Sequence[ClientBlock]) -> None:
        self._executor, self._blocks = executor, blocks

    def first(self, batches: int) -> tuple[Tensor, Tensor]:
        """See `Passes.first`."""
        z = self._executor.rows.z
        norms = torch.zeros(len(tasks_of(self._blocks)), 1, dtype=torch.float64, device=z.device)
        return self._executor.mean_gradients(self._blocks, lambda task: task.first_batches(batches), norms), norms

    def all(self) -> Tensor:
        """See `Passes.all`."""
        return self._executor.mean_gradients(self._blocks, Task.all_batches)
