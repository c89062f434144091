"""Local steps of stacked clients as captured CUDA graphs, for any number of clients and any size of a batch.

The rows of a step are copied next to each other, take one step or several, and are copied back. The number of rows is
4, 16, 64 and so on, or the number of slots. Few numbers mean few graphs, and rows cost little on a GPU. If fewer
clients step, the first client's row is read again, and the results of the repeated row go to a spare row that no client
has. Steps that are not captured have the same number of rows, so that a capture changes no bits.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastsam.fed.clients.samples import Tensors
from fastsam.fed.common.transfer import to_device
from fastsam.fed.executors.cuda import Cuda
from fastsam.fed.executors.rowprograms.row_steps import RowSteps
from fastsam.fed.executors.stacked_client import Group, gather_samples, keys_of, next_indices
from fastsam.fed.executors.stacked_steps import StackedStep
from fastsam.fed.executors.task import Setup
from fastsam.fed.update.rows import Rows
from fastsam.fed.update.scratch_rows import ScratchRows
from fastsam.fed.update.steps import Key

log = logging.getLogger("fastsam.fed")

MAX_GRAPHS = 32
TakeStep = Callable[[Rows, Tensors], StackedStep]  # function of rows and a batch
Sort = tuple[Key, int, int, int]  # key of the steps, size of a batch, number of rows, and number of steps


class StepGraph(NamedTuple):
    """Captured steps, the int64 tensor from which they read their inputs, and objects whose memory they use."""

    graph: Any
    inputs: Tensor
    references: object


class StepGraphs:
    """The captured steps of one run. They replay one after the other on one stream, so they share one pool."""

    def __init__(self, cuda: Cuda, slots: int) -> None:
        self.cuda, self.slots, self.stream, self._pool = cuda, slots, cuda.stream(), cuda.pool()
        self._graphs: dict[Sort, StepGraph] = {}
        self._passes: dict[Key, int] = {}  # number of backward passes of a step

    def release(self) -> None:
        """Release all graphs at the end of a run."""
        self.cuda.synchronize()
        self._graphs.clear()

    def serves(self, clients: Group) -> bool:
        """Return True if clients may take their next steps here: their samples are in a store, and no row is copied
        before a step."""
        has_store = clients[0].task.work.clients.store is not None and clients[0].batches is None
        return has_store and not any(client.task.snapshots for client in clients)

    def train(self, clients: Group, row_steps: RowSteps, scratch: ScratchRows, step: TakeStep) -> None:
        """Take the next steps of clients in copies of their rows: by a captured graph, or as they are.

        A replay takes the largest number of equal steps for which there is a graph. If there is none, the steps are
        eight, four, two or one, and are captured, so that few graphs are.
        They are captured once their pass is recorded and compared, unless row programs take it from then on. A model or
        an objective that runs through its Python might be frozen by a capture.
        """
        first = clients[0]
        n, samples, size = _number_of_rows(len(clients), self.slots), first.samples, first.size
        most = 1 if first.key.has_rate else min(client.equal_steps() for client in clients)
        keys = [(first.key, size, n, steps) for steps in (8, 4, 2, 1) if steps <= most]
        key = next((key for key in keys if key in self._graphs), keys[0])
        steps = key[-1]
        draws = row_steps.setup.draws is not None
        inputs = to_device(self._inputs(clients, n, steps, draws), samples[0].device)
        if first.key.has_rate:
            row_steps.rows.set_rates([client.rate for client in clients], inputs[: len(clients), 0])
        is_plain = True

        def work(inputs: Tensor) -> None:
            nonlocal is_plain
            copies = scratch.gather(inputs[:, 0], first.key)
            for i, places in enumerate(inputs[:, -steps * size :].split(size, 1), 2):
                batch = gather_samples(samples, places)
                keys = [inputs[:, i : i + 1].expand(-1, size)] if draws else []
                passes = step(copies, (*batch, *keys))
                self._passes[first.key], is_plain = passes.count, passes.is_plain
            scratch.put_back(inputs[:, 1], copies)

        if key in self._graphs:
            self._replay(self._graphs[key], inputs)
        else:
            work(inputs)
            function = row_steps.replays.find_function(size, n, *samples, *([inputs[:, 0]] if draws else []))
            if is_plain and function is not None and first.error is None and not row_steps.serves(first):
                self._capture(key, inputs, work, (samples, function, scratch))
        for client in clients:
            client.advance(steps, self._passes[first.key])

    def _capture(self, key: Sort, inputs: Tensor, work: Callable[[Tensor], None], references: object) -> None:
        """Capture `work(inputs)`, which has run with inputs of this shape before: libraries set up on first use, and
        that cannot be captured. Raises CaptureError."""
        if len(self._graphs) == MAX_GRAPHS:
            return
        self.stream.wait_stream(self.cuda.current())
        fixed = inputs.clone()
        graph = self.cuda.capture(partial(work, fixed), self.stream, self._pool)
        self.cuda.current().wait_stream(self.stream)
        self._graphs[key] = StepGraph(graph, fixed, references)
        if len(self._graphs) == MAX_GRAPHS:
            log.warning(
                "%d sorts of steps are captured as CUDA graphs. Other sorts run one operation at a time, which is "
                "slower. Fewer batch sizes (drop_last=True) or slots make fewer sorts",
                MAX_GRAPHS,
            )

    def _replay(self, captured: StepGraph, inputs: Tensor) -> None:
        """Take captured steps with other inputs, of the same shape."""
        self.stream.wait_stream(self.cuda.current())
        with self.cuda.use(self.stream):
            captured.inputs.copy_(inputs)
            captured.graph.replay()
        self.cuda.current().wait_stream(self.stream)

    def _inputs(self, clients: Group, n: int, steps: int, draws: bool) -> Tensor:
        """Return the inputs of `n` rows, int64 `[n, 2 + seeds + steps * batch]` on the host: the row that is read, the
        row that is written, the seeds of the steps if the model draws, and the samples."""
        missing, first = n - len(clients), clients[0]
        rows = [*[(c.slot, c.slot) for c in clients], *[(first.slot, self.slots)] * missing]
        clients = [*clients, *[first] * missing]
        keys = [keys_of(clients, steps)] if draws else []
        return torch.cat([torch.tensor(rows, device="cpu"), *keys, next_indices(clients, steps)], 1)


def _number_of_rows(n: int, slots: int) -> int:
    """Return 4, 16, 64 and so on, or the number of slots."""
    count = 4
    while count < n:
        count *= 4
    return min(count, slots)


def step_graphs_of(setup: Setup, slots: int) -> StepGraphs | None:
    """Return the captured steps of a run on a GPU, or None on a CPU."""
    return StepGraphs(Cuda(setup.device), slots) if setup.device.type == "cuda" else None
