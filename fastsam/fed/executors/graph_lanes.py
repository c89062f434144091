"""A lane with captured steps: its graphs, and the memory that its steps read and write every time."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence, Set
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fastsam.fed.clients.plan import BLOCK
from fastsam.fed.clients.samples import leaves, map_tree, tensors_of
from fastsam.fed.executors.base import ClientError
from fastsam.fed.executors.cuda import Cuda
from fastsam.fed.executors.randomness import LaneRandomness, PassRandomness
from fastsam.fed.executors.streams import Lane
from fastsam.fed.executors.task import Setup
from fastsam.fed.update.rows import Rows
from fastsam_kernels.hparams import HParam

GRAPH_STEPS = 8  # largest number of steps in a graph, a power of two
_EAGER_STEPS = 2  # steps before a capture, because libraries set up on first use and that cannot be captured
_MAX_GRAPHS = 16  # graphs of a lane; steps of further sorts are not captured
_ALIGNMENT = {"cpu": 64, "cuda": 256}  # bytes: how finely libraries look at where a tensor begins
Batch = tuple[Any, Any]  # inputs and labels, or a tree of tensors and None


def equal_steps(k: int, sizes: Sequence[int], epoch: int, copied_steps: Set[int], most: int = GRAPH_STEPS) -> int:
    """Return how many steps from step k on one graph may hold: a power of two, in one block of batches of one size.
    A step before which the row is copied is taken by itself.

    Args:
        k: the next step.
        sizes: number of samples of each step of the client.
        epoch: number of steps of an epoch, in which only the last batch may be partial.
        copied_steps: steps before which the row is copied.
        most: largest number of steps.
    """
    count, place = 1, k % epoch
    end = min(k + most, k - place + epoch, k - place % BLOCK + BLOCK, len(sizes))
    while (stop := k + 2 * count) <= end and sizes[stop - 1] == sizes[k] and copied_steps.isdisjoint(range(k, stop)):
        count *= 2
    return count


class LaneMemory:
    """The rows of all lanes in one memory, with the orders of samples, the counters and the schedules that captured
    steps read.

    Attributes:
        store: the samples of all clients, or None if captured steps cannot read them.
        indices: int64 `[slots, samples]`, the samples of the steps of each row in order, as indices of the store.
        counters: int64 `[slots, 2]`, the numbers of samples and of scheduled steps that each row has taken.
        schedule: float64 `[slots, steps]`, the learning rate of each step, or None if clients have unknown sizes.
        range: int64 `[samples]`, 0, 1, ...: the largest number of samples of a graph.
    """

    def __init__(self, setup: Setup, slots: int, samples_at_once: int) -> None:
        self.rows, clients, options = Rows(setup, slots, copies=True), setup.population.clients, setup.options
        # `sequential` reads batches of trees one by one, and a part of a longer gather would begin elsewhere in memory.
        has_pairs = setup.population.augment is None and not clients.is_batched
        self.store = clients.store if has_pairs else None
        # Without shuffling `sequential` trains on views of the store, whose strides a gathered batch would not have.
        if self.store is not None and not options.shuffle:
            is_contiguous = self.store.x.is_contiguous() and self.store.y.is_contiguous()
            self.store = self.store if is_contiguous else None
        sizes = set(clients.sizes) if clients.has_all_sizes else {0}
        longest = max(map(options.samples_of, sizes)) if self.store is not None else 0
        self.indices = torch.zeros(slots, longest, dtype=torch.int64, device=setup.device)
        self.range = torch.arange(samples_at_once, device=setup.device)
        self.counters = torch.zeros(slots, 2, dtype=torch.int64, device=setup.device)
        self.schedule: Tensor | None = None
        if clients.has_all_sizes:
            shape = slots, max(map(options.steps_of, sizes))
            self.schedule = torch.zeros(shape, dtype=torch.float64, device=setup.device)


@dataclass
class RepeatedSteps:
    """Steps that a lane takes again and again: without a graph at first, then by a replay.

    Attributes:
        num_eager: number of steps that were taken without a graph, and without an error: a capture that fails ends the
            run.
        passes: number of their backward passes in one call.
        graph: their graph.
        inputs: the batch that the graph reads, if it is not in the store.
    """

    num_eager: int = 0
    passes: int = 0
    graph: Any = None
    inputs: Batch | None = None


class GraphLane(Lane):
    """A lane in a row of `LaneMemory`, whose steps read and write the same memory every time, so that they can be
    captured. The methods run on the lane's stream.

    With a store several steps are taken together, and gather their batches themselves: the next indices of the row,
    counted on the device. Other batches are copied into fixed inputs. Learning rates of a schedule come from a table at
    a counter.

    The first steps of every sort run without a graph. All graphs of a lane have one pool of memory, because they replay
    one after the other.

    Attributes:
        steps_by_key: the steps, by all that their graph depends on.
        num_graphs: number of graphs.
    """

    def __init__(self, setup: Setup, random: PassRandomness, cuda: Cuda, memory: LaneMemory, slot: int) -> None:
        super().__init__(setup, random, cuda, memory.rows.part(slot, slot + 1))
        self.slot, self.memory, self.pool = slot, memory, cuda.pool()
        self.samples_done, self.steps_done = memory.counters[slot].split(1)
        self.draws = random if isinstance(random, LaneRandomness) else None
        self.steps_by_key, self.num_graphs = dict[Hashable, RepeatedSteps](), 0

    def set_rate(self) -> None:
        """See `ClientTrainer.set_rate`."""
        if self.memory.schedule is None:
            super().set_rate()
            return
        self.rows.hparams[:, 0, HParam.LR].copy_(self.memory.schedule[self.slot].index_select(0, self.steps_done))
        self.steps_done.add_(1)

    def note_loss(self, losses: Tensor, size: int) -> None:
        """See `ClientTrainer.note_loss`. A replay adds up its losses."""
        self.rows.losses.add_(losses, alpha=size)

    def take_steps(self) -> bool:
        """Take the next steps: the steps of one graph, or a single step on a batch that has been read. Return False if
        no step is left."""
        k, size, steps = self.k, self.batch_sizes[self.k], 1
        if self.memory.store is not None:
            epoch = len(self.task.work.sizes)
            steps = equal_steps(k, self.batch_sizes, epoch, self.task.snapshots)
            alignments = self._alignments(k % epoch)
            self._run((size, steps, alignments), steps, lambda _: self._take_stored(size, steps, alignments))
        else:
            with self.client_errors:
                batch = next(self.batches)
            layout = layout_of(batch)
            sort = None if layout is None else (size, layout)
            self._run(sort, 1, partial(self._take_read, size), batch)
        self.k = k + steps  # a replay does not count
        return self.k < len(self.batch_sizes)

    def _take_stored(self, size: int, steps: int, alignments: Sequence[int]) -> None:
        """Take steps on the next samples of the row."""
        memory, number, parts = self.memory, size * steps, []
        assert memory.store is not None
        indices = memory.indices[self.slot].index_select(0, memory.range[:number] + self.samples_done)
        self.samples_done.add_(number)
        for data, alignment in zip(memory.store.tensors, alignments, strict=True):
            shape = number, *data.shape[1:]
            batches = aligned(data, math.prod(shape), alignment).view(shape)
            parts.append(torch.index_select(data, 0, indices, out=batches).split(size))
        with self.client_errors:
            for x, y in zip(*parts, strict=True):
                self.note_loss(self.run_step(x, y), size)

    def _take_read(self, size: int, batch: Batch) -> None:
        """Take a step on a batch of `size` samples."""
        with self.client_errors:
            self.note_loss(self.run_step(*batch), size)

    def _alignments(self, place: int) -> tuple[int, ...]:
        """Return for x and y of the epoch's batches from `place` on how far `sequential` has them from a multiple of
        the alignment. Libraries' rounding depends on it. Whole numbers count as 0, because each of 16 alignments would
        have separate graphs."""
        assert self.memory.store is not None
        unit, result = _ALIGNMENT[self.z.device.type], list[int]()
        for data, own in zip(self.memory.store.tensors, self.task.work.tensors, strict=True):
            bytes_of_batch = self.batch_sizes[0] * data[0].numel() * data.element_size()
            if not data.is_floating_point():
                result.append(0)
            elif self.setup.options.shuffle:  # a new tensor for each block
                result.append(place % BLOCK * bytes_of_batch % unit)
            else:
                result.append((own.data_ptr() + place * bytes_of_batch) % unit)
        return tuple(result)

    # --- graphs ---

    def _run(self, sort: Hashable, steps: int, work: Callable[[Any], None], batch: Batch | None = None) -> None:
        """Take steps: without a graph, or by a replay.

        Args:
            sort: properties that a graph depends on, in addition to the key of the step. None: it cannot be captured.
            steps: number of steps.
            work: function of a batch that takes them.
            batch: the batch, None if it is in the store.
        """
        has_rate = not self.step.key.has_rate or self.memory.schedule is not None
        if sort is None or not has_rate or self.k in self.task.snapshots:  # the row is copied before the step
            work(batch)
            return
        key, count = (self.step.key, sort), self.backward_passes
        captured = self.steps_by_key.setdefault(key, RepeatedSteps())
        if self.draws is not None:
            self.draws.begin_replay(self.task, self.k)
        if captured.graph is None and captured.num_eager >= _EAGER_STEPS and self.num_graphs < _MAX_GRAPHS:
            self._capture(captured, work, batch)
        if captured.graph is None:
            work(batch)
            captured.num_eager += steps
            captured.passes = self.backward_passes - count
            return
        if batch is not None:
            torch._foreach_copy_(tensors_of(captured.inputs), tensors_of(batch))
        captured.graph.replay()
        self.backward_passes = count + captured.passes

    def _capture(self, steps: RepeatedSteps, work: Callable[[Any], None], batch: Batch | None) -> None:
        steps.inputs = map_tree(lambda leaf: _like(leaf) if isinstance(leaf, Tensor) else leaf, batch)
        state = None if self.draws is None else self.draws.state
        try:
            steps.graph = self.cuda.capture(partial(work, steps.inputs), self.stream, self.pool, state)
            self.num_graphs += 1
        except ClientError as error:
            error.client_ids = ()  # it is not the client's: after a capture that failed no other client can train
            raise


def layout_of(batch: Batch) -> Hashable:
    """Return the properties that two batches must share to have the same inputs, or None if they cannot be copied into
    inputs. Libraries' rounding depends on them. See `GraphLane._alignments`."""
    can_be_copied = all(map(fills, tensors_of(batch)))
    return tuple((path, _layout_of_leaf(leaf)) for path, leaf in leaves(batch)) if can_be_copied else None


def _layout_of_leaf(leaf: Any) -> Hashable:
    if not isinstance(leaf, Tensor):
        return repr(leaf)
    return leaf.shape, leaf.stride(), leaf.dtype, _offset(leaf) if leaf.is_floating_point() else 0


def _offset(t: Tensor) -> int:
    return t.data_ptr() % _ALIGNMENT[t.device.type]


def fills(t: Tensor) -> bool:
    """Return True if no two elements share memory, as after `expand`. Then it can be copied into."""
    return all(stride > 0 or size <= 1 for size, stride in zip(t.shape, t.stride(), strict=True))


def aligned(like: Tensor, numel: int, alignment: int) -> Tensor:
    """Return memory `[numel]` that begins `alignment` bytes after a multiple of the device's alignment, with the dtype
    and the device of `like`."""
    size, unit = like.element_size(), _ALIGNMENT[like.device.type]
    raw = torch.empty(numel + 2 * unit // size, dtype=like.dtype, device=like.device)
    begin = (alignment - _offset(raw)) % unit // size
    return raw[begin : begin + numel]


def _like(t: Tensor) -> Tensor:
    """Return memory that is laid out as `t`, and as far from a multiple of the alignment."""
    extent = 1 + sum(max(n - 1, 0) * stride for n, stride in zip(t.shape, t.stride(), strict=True))
    return aligned(t, extent, _offset(t)).as_strided(t.shape, t.stride())
