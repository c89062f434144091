"""Captured local steps: each lane replays its clients' steps from CUDA graphs. The host then queues one thing where it
queued thousands.

    open      neighbouring lanes begin together, on the caller's stream (LaneRows.begin); each lane waits for one event
    step      a chunk of steps on the lane's stream: one replay (GraphLane.step)
    close     lanes that ended are joined, and their results are made together (LaneRows.results)

Lanes that ended are closed, refilled and stepped before their results are yielded, because the receiver waits for the
device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from fastsam.fed.executors import streams
from fastsam.fed.executors.base import ClientOutcome, refusal
from fastsam.fed.executors.capture_trial import why_not_captured
from fastsam.fed.executors.cuda import tensors
from fastsam.fed.executors.graph_lanes import CapturableTrainer, Chunk, GraphLane, cut
from fastsam.fed.executors.lane_rows import LaneRows
from fastsam.fed.executors.memory_errors import name_slots
from fastsam.fed.executors.randomness import LaneRandomness
from fastsam.fed.executors.stacked_client import runs
from fastsam.fed.executors.streams import LaneExecutor
from fastsam.fed.executors.task import Setup, Task, sort_of
from fastsam.fed.update.passes import Passes
from fastsam.fed.update.results import ClientResults

GRAPH_STEPS = 8  # largest number of steps in a graph, a power of two


class Graph(LaneExecutor):
    """One `CapturableTrainer` and one stream per slot, with captured steps.

    A graph holds up to `GRAPH_STEPS` steps of one lane. It is captured once per lane, key of the step and shape, not
    per round. A partial batch has a graph of its shape. Steps that are copied for a measure, the first steps of a sort,
    and sorts beyond the number of graphs that a lane keeps run without a graph. Without a store of samples a graph has
    one step.

    A graph has the values of its capture. A model or loss that reads values on the host (`item()`, `if` on a tensor),
    draws random numbers on the host, or changes its Python state in a pass is refused (`capture_trial`). Random numbers
    of the device are drawn at seeds and offsets that each replay gets, from a state of the lane.
    """

    name = "graph"
    default_slots = 16  # on an H200 a CNN's round of 100 clients takes 17.8 ms, with 8 slots 21.4 and with 31 16.8

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.slots = min(self.slots, setup.cohort or self.slots)
        self.most = GRAPH_STEPS
        with name_slots(self.slots):
            self.rows = LaneRows(setup, self.slots, self.most * setup.options.batch_size)
        self._lanes: list[GraphLane] = []
        self._chunks: dict[tuple[int, frozenset[int]], list[Chunk]] = {}

    @staticmethod
    def why_not(setup: Setup) -> str | None:
        """See `LaneExecutor.why_not`."""
        return refusal(setup) or streams.why_not(setup) or why_not_captured(setup, streams.Cuda(setup.device))

    @property
    def lanes(self) -> Sequence[GraphLane]:
        """See `LaneExecutor.lanes`."""
        return self._lanes

    def _outcomes(self, start: Tensor, buffers: Sequence[Tensor], tasks: Iterator[Task]) -> Iterator[ClientOutcome]:
        finished_lanes: list[GraphLane] = []
        while True:
            parts = self._close(finished_lanes)
            errors = [lane.error for lane in finished_lanes if lane.error is not None]
            with name_slots(self.slots):
                self._refill(start, buffers, tasks)
            busy = [lane for lane in self._lanes if lane.busy]
            finished_lanes = [lane for lane in busy if not lane.step()]
            yield from errors
            yield from self._join(parts)
            if not busy:
                return

    def _refill(self, start: Tensor, buffers: Sequence[Tensor], tasks: Iterator[Task]) -> None:
        """Begin clients in the free lanes."""
        is_free = [slot >= len(self._lanes) or not self._lanes[slot].busy for slot in range(self.slots)]
        free = [slot for slot in range(self.slots) if is_free[slot]]
        opened = list(zip(free, tasks, strict=False))
        for slot, task in opened:
            lane = self._lane(slot)
            lane.busy, lane.error = True, None
            lane.call(lane.row.set_task, task, start, buffers)
        lanes = [self._lanes[slot] for slot, _ in opened if self._lanes[slot].error is None]
        for group in self._neighbours(lanes):
            self.rows.begin(group[0].row.slot, [lane.row for lane in group], start, _LanePasses(group))
        if not lanes:
            return
        event = self.cuda.current().record_event()
        for lane in lanes:
            lane.stream.wait_event(event)
            lane.begin(self._chunks_of(lane.row.task))

    def _close(self, lanes: Sequence[GraphLane]) -> list[ClientResults]:
        """Free lanes that ended, and return the results of their clients, ready on the caller's stream."""
        current, parts = self.cuda.current(), []
        for lane in lanes:
            current.wait_stream(lane.stream)
            lane.busy = False
        for group in self._neighbours([lane for lane in lanes if lane.error is None]):
            parts.append(self.rows.results(group[0].row.slot, [lane.row for lane in group]))
            self.cuda.record_stream(tensors(parts[-1]), current)
        return parts

    @staticmethod
    def _neighbours(lanes: Sequence[GraphLane]) -> list[Sequence[GraphLane]]:
        """Return lanes in groups of neighbours whose steps are of one sort."""
        keys = [(lane.row.slot - i, sort_of(lane.row.task.step)) for i, lane in enumerate(lanes)]
        return [lanes[part] for part in runs(keys)]

    def _chunks_of(self, task: Task) -> list[Chunk]:
        """Return the steps of a client in chunks."""
        key = task.work.samples, task.snapshots
        if key not in self._chunks:
            most = 1 if self.rows.store is None else self.most
            self._chunks[key] = cut(task.work.batch_sizes(), len(task.work.sizes), task.snapshots, most)
        return self._chunks[key]

    def _lane(self, slot: int) -> GraphLane:
        """Return a lane, which is made when it is first needed."""
        if slot == len(self._lanes):
            draws = self.setup.draws is not None
            random = LaneRandomness(self.setup.device, self.cuda) if draws else self.random
            self._lanes.append(GraphLane(CapturableTrainer(self.setup, random, self.rows, slot), self.cuda))
        return self._lanes[slot]

    def release(self) -> None:
        """See `Executor.release`. All graphs are released together (see `Cuda.synchronize`)."""
        self.cuda.synchronize()
        for lane in self._lanes:
            lane.graphs.clear()


class _LanePasses(Passes):
    """The passes of neighbouring lanes before their first step, each on its own stream (see
    `fastsam.fed.update.passes.Passes`)."""

    def __init__(self, lanes: Sequence[GraphLane]) -> None:
        self._lanes = lanes

    def first(self, batches: int) -> tuple[Tensor, Tensor]:
        """See `Passes.first`."""
        gradients, norms = zip(*self._run(lambda row: row.first(batches)), strict=True)
        return torch.cat(gradients), torch.cat(norms)

    def all(self) -> Tensor:
        """See `Passes.all`."""
        return torch.cat([parts[0] for parts in self._run(lambda row: (row.all(),))])

    def _run(self, work: Callable[[CapturableTrainer], tuple[Tensor, ...]]) -> list[tuple[Tensor, ...]]:
        """Return the tensors of all lanes, ready on the caller's stream. A client that is excluded has zeros."""
        results = []
        for lane in self._lanes:
            cuda, current = lane.cuda, lane.cuda.current()
            lane.stream.wait_stream(current)
            with cuda.use(lane.stream):
                lane.row.random.begin(lane.row.task)  # a model may draw in these passes too
                parts = lane.call(work, lane.row)
            current.wait_stream(lane.stream)
            results.append(parts)
            cuda.record_stream(parts or (), current)
        template = next((parts for parts in results if parts is not None), None)
        if template is None:
            zero = torch.zeros_like(self._lanes[0].row.z)
            template = zero, zero.new_zeros(1, 1, dtype=torch.float64)
        return [tuple(map(torch.zeros_like, template)) if parts is None else parts for parts in results]
