"""The local work of one client in a row: a loop of the algorithm, or else the run's epochs of local steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from fastsam.fed.executors.client import Client, StopClient
from fastsam.fed.executors.client_trainer import ClientTrainer
from fastsam.fed.executors.task import ClientLoop, Task
from fastsam.fed.update.results import ClientResults


def train(
    row: ClientTrainer,
    task: Task,
    start: Tensor,
    buffers: Sequence[Tensor],
    stop_requested: Callable[[], bool] | None = None,
) -> ClientResults:
    """Do the local work of a client in a row, from the global model's weights and buffers.

    Raises:
        ClientError: the model or the loss raised.
        StopClient: `stop_requested` returned True.
        ValueError: the losses of a step were written over.
    """
    row.open(task, start, buffers)
    if task.loop is not None:
        return run_loop(row, task.loop, stop_requested)
    with row.client_errors:
        for (x, y), size in zip(row.batches, row.batch_sizes, strict=True):
            if stop_requested is not None and stop_requested():
                raise StopClient
            row.note_loss(row.run_step(x, y), size)
    return row.results()


def run_loop(row: ClientTrainer, loop: ClientLoop, stop_requested: Callable[[], bool] | None = None) -> ClientResults:
    """Run the loop of the algorithm for the client that is open in a row. Other clients may have been opened since.

    Raises: as `train`.
    """
    if row.random.draws:
        row.random.seed_pass(row.task, 0)  # for passes that the loop makes by itself
    client = Client(row, stop_requested)
    return client.results(loop.run(client))
