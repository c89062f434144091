"""Local epochs of stacked clients as captured CUDA graphs: for an epoch the host queues the order of its samples and
one graph, where it queued every operation of every step."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import NamedTuple

import torch
from torch import Tensor

from fastsam.fed.clients.samples import Tensors
from fastsam.fed.executors.client_block import ClientBlock
from fastsam.fed.executors.cuda import Cuda
from fastsam.fed.executors.replay import Function, Replays
from fastsam.fed.executors.task import Setup
from fastsam.fed.update.rows import Rows

MAX_GRAPHS = 16  # graphs, each with its own memory; later sorts train step by step
_EAGER_EPOCHS = 2  # epochs before a capture, because libraries set up on first use and that cannot be captured

TakeStep = Callable[[Tensors], object]  # function of a batch


class CapturedEpoch(NamedTuple):
    """A captured epoch.

    Attributes:
        graph: the graph.
        places: int64 `[rows, samples]`, the indices of its samples.
        references: objects that it reads, which must stay alive.
    """

    graph: torch.cuda.CUDAGraph
    places: Tensor
    references: tuple[object, ...]


class EpochGraphs:
    """The captured epochs of one run, by rows, kind and number of samples.

    One is captured for clients that begin together and are alike, whose passes are replayed from recordings: a model
    that runs through its Python might be frozen by a capture. Steps that are kept for a measure run as they are.
    """

    def __init__(self, cuda: Cuda) -> None:
        self.cuda, self.stream = cuda, cuda.stream()
        self._graphs, self._num_eager = dict[Hashable, CapturedEpoch](), dict[Hashable, int]()

    def release(self) -> None:
        """Release all graphs at the end of a run."""
        self.cuda.synchronize()
        self._graphs.clear()

    def train(self, block: ClientBlock, rows: Rows, replays: Replays, step: TakeStep) -> bool:
        """Run the block's next epoch in the rows of `rows`, whose key is set. Return False if its steps must
        be taken one by one."""
        if block.k % block.epoch or block.gatherer is None or block.tasks[0].setup.population.clients.store is None:
            return False
        if any(task.snapshots for task in block.tasks) or block.k + block.epoch > block.steps:
            return False
        key = (rows.place.start, rows.place.stop, rows.key, block.tasks[0].work.samples)
        epoch = self._graphs.get(key)
        functions = () if epoch is not None else self._functions(key, block, replays)
        if functions is None:
            return False
        places = block.gatherer.sample_indices(block.k, block.epoch).places
        self.stream.wait_stream(self.cuda.current())
        with self.cuda.use(self.stream):
            if epoch is None:
                epoch = self._graphs[key] = self._capture(block, places.clone(), functions, step)
            epoch.places.copy_(places)
            epoch.graph.replay()
        self.cuda.current().wait_stream(self.stream)
        block.k += block.epoch
        return True

    def _functions(self, key: Hashable, block: ClientBlock, replays: Replays) -> tuple[Function, ...] | None:
        """Return the recorded passes of an epoch that is captured now, or None."""
        self._num_eager[key] = self._num_eager.get(key, 0) + 1
        passes = [replays.find_function(size, len(block.tasks), *block.samples) for size in sorted(set(block.sizes))]
        functions = tuple(function for function in passes if function is not None)
        is_eager = self._num_eager[key] <= _EAGER_EPOCHS
        return None if is_eager or len(self._graphs) == MAX_GRAPHS or len(functions) < len(passes) else functions

    def _capture(
        self, block: ClientBlock, places: Tensor, functions: tuple[Function, ...], step: TakeStep
    ) -> CapturedEpoch:
        samples = block.samples

        def work() -> None:
            offset = 0
            for size in block.sizes:
                indices = places[:, offset : offset + size]
                batch = tuple(t.index_select(0, indices.flatten()).unflatten(0, indices.shape) for t in samples)
                step(batch)
                offset += size

        return CapturedEpoch(self.cuda.capture(work, self.stream), places, (samples, functions))


def epoch_graphs_of(setup: Setup) -> EpochGraphs | None:
    """Return the captured epochs of a run, or None if its functions may have graphs themselves (compiled models)."""
    return EpochGraphs(Cuda(setup.device)) if setup.device.type == "cuda" else None
