"""One client after the other in one row: the plain executor, and the meaning of all others."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from torch import Tensor

from fastsam.fed.executors.base import ClientError, Ends, Executor, Setup, Task
from fastsam.fed.executors.row import Row


class Sequential(Executor):
    """One `Row`. Results come in the order of the tasks. Torch's own threads work inside an operation."""

    name = "sequential"

    def __init__(self, setup: Setup) -> None:
        self.setup, self.row = setup, Row(setup)

    def train(self, start: Tensor, buffers: Sequence[Tensor], tasks: Iterable[Task]) -> Iterator[Ends]:
        """See `Executor.train`."""
        row = self.row
        with row.random.guarded():
            for task in tasks:
                ends: Ends
                try:
                    self._attempt(task, start, buffers)
                    if (
                        row.random.found()
                    ):  # the first client whose model draws is trained again, with the seeds of its passes
                        self._attempt(task, start, buffers)
                    ends = row.close()
                except ClientError as error:
                    if not self.setup.excludes(error):
                        raise
                    ends = error
                yield ends

    def _attempt(self, task: Task, start: Tensor, buffers: Sequence[Tensor]) -> None:
        self.row.open_(task, start, buffers)
        while self.row.step_():
            pass
