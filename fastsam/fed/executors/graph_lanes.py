"""A lane with captured steps: its graphs, and the trainer whose steps read and write the same memory every time."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastsam.fed.clients.plan import BLOCK
from fastsam.fed.clients.samples import leaves, map_tree, tensors_of
from fastsam.fed.executors.base import ClientError
from fastsam.fed.executors.client_trainer import ClientTrainer
from fastsam.fed.executors.cuda import Cuda
from fastsam.fed.executors.lane_rows import LaneRows
from fastsam.fed.executors.randomness import LaneRandomness, PassRandomness
from fastsam.fed.executors.streams import Lane
from fastsam.fed.executors.task import Setup
from fastsam.fed.update.steps import Key
from fastsam_kernels.hparams import HParam

_EAGER_STEPS = 2  # steps before a capture, because libraries set up on first use and that cannot be captured
_MAX_GRAPHS = 16  # graphs of a lane; steps of further sorts are not captured
_ALIGNMENT = {"cpu": 64, "cuda": 256}  # bytes: how finely libraries look at where a tensor begins
Batch = tuple[Any, Any]  # inputs and labels, or a tree of tensors and None


@dataclass(frozen=True)
class Chunk:
    """Neighbouring steps of a client, which one graph may hold.

    Attributes:
        sizes: number of samples of each step.
        in_epoch, in_block: number of samples before them in the epoch, and in the block of batches.
        is_copied: the row is copied before the step for a measure.
    """

    sizes: tuple[int, ...]
    in_epoch: int = 0
    in_block: int = 0
    is_copied: bool = False


def cut(sizes: Sequence[int], epoch: int, copied_steps: frozenset[int], most: int) -> list[Chunk]:
    """Return the steps of a client in chunks: each block of batches in powers of two of up to `most` steps, a partial
    batch and a step before which the row is copied by themselves.

    Args:
        sizes: number of samples of each step.
        epoch: number of steps of an epoch.
        copied_steps: steps before which the row is copied.
        most: largest number of steps of a chunk.
    """
    chunks, k = list[Chunk](), 0
    while k < len(sizes):
        first, count = k - k % epoch, 1
        block = first + (k - first) // BLOCK * BLOCK
        end = min(first + epoch, block + BLOCK, len(sizes))
        while 2 * count <= most and k + 2 * count <= end:
            steps = range(k, k + 2 * count)
            if not copied_steps.isdisjoint(steps) or any(sizes[i] != sizes[k] for i in steps):
                break
            count *= 2
        in_epoch, in_block = sum(sizes[first:k]), sum(sizes[block:k])
        chunks.append(Chunk(tuple(sizes[k : k + count]), in_epoch, in_block, k in copied_steps))
        k += count
    return chunks


class CapturableTrainer(ClientTrainer):
    """A row of `LaneRows` whose steps read and write the same memory every time, so that they can be captured.

    With a store a chunk gathers its batches itself: the next indices of the row, counted on the device. Other batches
    are copied into fixed inputs, one tree per layout. Learning rate and radius of a schedule come from a table at a
    counter. The methods run on the lane's stream.
    """

    def __init__(self, setup: Setup, random: PassRandomness, lanes: LaneRows, slot: int) -> None:
        super().__init__(setup, random, lanes.rows.part(slot, slot + 1))
        self.lanes, self.slot = lanes, slot
        self.samples_done, self.steps_done = lanes.counters[slot].split(1)
        self._inputs: dict[Hashable, Batch] = {}

    def set_rate(self) -> None:
        """See `ClientTrainer.set_rate`."""
        if self.lanes.schedule is None:
            super().set_rate()
            return
        self.rows.hparams[:, 0, HParam.LR].copy_(self.lanes.schedule[self.slot].index_select(0, self.steps_done))
        self.steps_done.add_(1)

    def note_loss(self, losses: Tensor, size: int) -> None:
        """See `ClientTrainer.note_loss`. A replay adds up its losses."""
        self.rows.losses.add_(losses, alpha=size)

    def alignments(self, chunk: Chunk) -> tuple[int, ...]:
        """Return for x and y of a chunk how far `sequential` has them from a multiple of the alignment. Libraries'
        rounding depends on it. Whole numbers count as 0, because each of 16 alignments would have separate graphs."""
        store, device = self.lanes.store, self.z.device.type
        assert store is not None
        result = []
        for data, own in zip(store.tensors, self.task.work.tensors, strict=True):
            size = data[0].numel() * data.element_size()
            if not data.is_floating_point():
                result.append(0)
            elif self.setup.options.shuffle:  # a new tensor for each block
                result.append(chunk.in_block * size % _ALIGNMENT[device])
            else:
                result.append((own.data_ptr() + chunk.in_epoch * size) % _ALIGNMENT[device])
        return tuple(result)

    def take_steps(self, sizes: Sequence[int], alignments: Sequence[int]) -> None:
        """Take steps on the next samples of the row."""
        store, indices, number = self.lanes.store, self.lanes.indices, sum(sizes)
        assert store is not None and indices is not None and self.lanes.range is not None
        places = indices[self.slot].index_select(0, self.lanes.range[:number] + self.samples_done)
        self.samples_done.add_(number)
        parts = []
        for data, alignment in zip((store.x, store.y), alignments, strict=True):
            shape = (number, *data.shape[1:])
            memory = aligned(data, shape, contiguous_strides(shape), alignment)
            parts.append(torch.index_select(data, 0, places, out=memory).split_with_sizes(list(sizes)))
        with self.client_errors:
            for x, y in zip(*parts, strict=True):
                self.note_loss(self.run_step(x, y), len(y))

    def take_step(self, batch: Batch, size: int) -> None:
        """Take a step on a batch of `size` samples."""
        with self.client_errors:
            self.note_loss(self.run_step(*batch), size)

    def static(self, batch: Batch) -> Batch:
        """Return the fixed inputs of the layout of `batch`, with its values."""
        key = layout_of(batch)
        if key not in self._inputs:
            self._inputs[key] = map_tree(lambda leaf: _like(leaf) if isinstance(leaf, Tensor) else leaf, batch)
        inputs = self._inputs[key]
        torch._foreach_copy_(tensors_of(inputs), tensors_of(batch))
        return inputs


def layout_of(batch: Batch) -> Hashable:
    """Return the properties that two batches must share to have the same inputs. Libraries' rounding depends on them.
    See `CapturableTrainer.alignments`."""
    return tuple((path, _layout_of_leaf(leaf)) for path, leaf in leaves(batch))


def _layout_of_leaf(leaf: Any) -> Hashable:
    if not isinstance(leaf, Tensor):
        return repr(leaf)
    return leaf.shape, leaf.stride(), leaf.dtype, _offset(leaf) if leaf.is_floating_point() else 0


def _offset(t: Tensor) -> int:
    return t.data_ptr() % _ALIGNMENT[t.device.type]


def fills(t: Tensor) -> bool:
    """Return True if no two elements share memory, as after `expand`. Then it can be copied into."""
    return all(stride > 0 or size <= 1 for size, stride in zip(t.shape, t.stride(), strict=True))


def aligned(like: Tensor, shape: Sequence[int], strides: Sequence[int], alignment: int) -> Tensor:
    """Return memory that begins `alignment` bytes after a multiple of the device's alignment, with the dtype and the
    device of `like`."""
    size, unit = like.element_size(), _ALIGNMENT[like.device.type]
    extent = 1 + sum(max(n - 1, 0) * stride for n, stride in zip(shape, strides, strict=True))
    raw = torch.empty(extent + 2 * unit // size, dtype=like.dtype, device=like.device)
    return raw.as_strided(shape, strides, (alignment - _offset(raw)) % unit // size)


def contiguous_strides(shape: Sequence[int]) -> list[int]:
    """Return the strides of contiguous memory of a shape."""
    return [math.prod(shape[i + 1 :]) for i in range(len(shape))]


def _like(t: Tensor) -> Tensor:
    """Return memory that is laid out as `t`, and as far from a multiple of the alignment."""
    return aligned(t, t.shape, t.stride(), _offset(t))


class CapturedSteps(NamedTuple):
    """A graph of steps, and the number of their backward passes."""

    graph: Any
    backward_passes: int

    def replay(self, row: CapturableTrainer) -> None:
        """Take the steps."""
        count = row.backward_passes + self.backward_passes
        self.graph.replay()
        row.backward_passes = count


class GraphLane(Lane):
    """A lane that replays its steps from graphs, several steps in a graph.

    The first steps of every sort run without a graph. All graphs of a lane have one pool of memory, because they replay
    one after the other.

    Attributes:
        chunks: steps of the client that are left, the next one last.
    """

    row: CapturableTrainer

    def __init__(self, row: CapturableTrainer, cuda: Cuda) -> None:
        super().__init__(row, cuda)
        self.pool = cuda.pool()
        self.draws = row.random if isinstance(row.random, LaneRandomness) else None
        self.graphs, self.eager_counts = dict[Hashable, CapturedSteps](), dict[Hashable, int]()
        self.step_passes: dict[Key, int] = {}  # number of passes of a step
        self.chunks: list[Chunk] = []

    def begin(self, chunks: Sequence[Chunk]) -> None:
        """Begin the steps of the client of the row, whose weights and vectors are in place."""
        self.chunks = list(reversed(chunks))
        self.row.batches = self.row.task.work.batches()

    def step(self) -> bool:
        """Queue the next chunk of steps. Return False if no step is left."""
        if self.error is None:
            with self.cuda.use(self.stream):
                self.call(self._run, self.chunks.pop())
        return self.error is None and bool(self.chunks)

    def _run(self, chunk: Chunk) -> None:
        k = self.row.k
        if self.row.lanes.store is not None:
            self._take_stored(chunk)
        else:
            self._take_next(chunk)
        self.row.k = k + len(chunk.sizes)  # a replay does not count

    def _take_stored(self, chunk: Chunk) -> None:
        """Take the steps of a chunk on samples of the store."""
        row, alignments = self.row, self.row.alignments(chunk)
        work = partial(row.take_steps, chunk.sizes, alignments)
        graph = self._graph_of(chunk, (chunk.sizes, alignments), lambda: work)
        if graph is None:
            self._run_eagerly(work, len(chunk.sizes))
        else:
            graph.replay(row)

    def _take_next(self, chunk: Chunk) -> None:
        """Take a step on the client's next batch. Only batches whose step is captured have fixed inputs."""
        row, size = self.row, chunk.sizes[0]
        with row.client_errors:
            batch = next(row.batches)
        graph = None
        if all(map(fills, tensors_of(batch))):
            layout = layout_of(batch)
            graph = self._graph_of(chunk, (size, layout), lambda: partial(row.take_step, row.static(batch), size))
        if graph is None:
            self._run_eagerly(partial(row.take_step, batch, size), 1)
        else:
            row.static(batch)
            graph.replay(row)

    def _run_eagerly(self, work: Callable[[], object], steps: int) -> None:
        """Take steps without a graph, and count the passes of one."""
        count = self.row.backward_passes
        work()
        self.step_passes[self.row.step.key] = (self.row.backward_passes - count) // steps

    def _graph_of(
        self, chunk: Chunk, sort: Hashable, make_work: Callable[[], Callable[[], object]]
    ) -> CapturedSteps | None:
        """Return the graph of a chunk, or None if it runs without a graph.

        Args:
            chunk: the chunk.
            sort: properties that its graph depends on, in addition to the key of the step.
            make_work: function that returns the work to capture, if it is time.
        """
        row, key = self.row, (self.row.step.key, sort)
        if chunk.is_copied or (row.step.key.has_rate and row.lanes.schedule is None):
            return None
        if self.draws is not None:
            self.draws.begin_replay(row.task, row.k)
        if key not in self.graphs and self._should_capture(key, len(chunk.sizes)):
            passes = len(chunk.sizes) * self.step_passes[row.step.key]
            self.graphs[key] = CapturedSteps(self._capture(make_work()), passes)
        return self.graphs.get(key)

    def _should_capture(self, key: Hashable, steps: int) -> bool:
        """Return True if enough steps of this sort were taken to capture them."""
        count = self.eager_counts.get(key, 0)
        self.eager_counts[key] = count + steps
        return count >= _EAGER_STEPS and len(self.graphs) < _MAX_GRAPHS

    def _capture(self, work: Callable[[], object]) -> Any:
        count, state = self.row.backward_passes, None if self.draws is None else self.draws.state
        try:
            graph = self.cuda.capture(work, self.stream, self.pool, state)
            self.row.backward_passes = count
            return graph
        except ClientError as error:
            error.client_ids = ()  # it is not the client's: after a capture that failed no other client can train
            raise
