"""One client after the other in one row: the plain executor, and the meaning of all others."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from torch import Tensor

from fastsam.fed.executors.base import ClientError, ClientOutcome, Executor, excludes
from fastsam.fed.executors.client_trainer import ClientTrainer
from fastsam.fed.executors.local_work import train
from fastsam.fed.executors.task import Setup, Task


class Sequential(Executor):
    """One `ClientTrainer`. Results come in the order of the tasks. Torch's own threads work inside an operation."""

    name = "sequential"

    def __init__(self, setup: Setup) -> None:
        self.setup, self.row = setup, ClientTrainer(setup)

    def train(self, start: Tensor, buffers: Sequence[Tensor], tasks: Iterable[Task]) -> Iterator[ClientOutcome]:
        """See `Executor.train`."""
        row = self.row
        with row.random.preserve_states():
            for task in tasks:
                results: ClientOutcome
                try:
                    results = train(row, task, start, buffers)
                    if row.random.has_drawn():
                        # The first client whose model draws is trained again, with the seeds of its passes.
                        results = train(row, task, start, buffers)
                except ClientError as error:
                    if not excludes(self.setup, error):
                        raise
                    results = error
                yield results
