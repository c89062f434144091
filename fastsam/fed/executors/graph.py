"""Captured local steps: each lane replays its clients' steps from CUDA graphs. The host then queues one thing where it
queued thousands.

    open      neighbouring lanes begin together, on the caller's stream (LaneRows.begin); each lane waits for one event
    step      a chunk of steps on the lane's stream: one replay (GraphLane.take_steps)
    close     lanes that ended are joined, and their results are made together (LaneRows.results)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from fastsam.fed.executors import streams
from fastsam.fed.executors.base import refusal
from fastsam.fed.executors.capture_trial import why_not_captured
from fastsam.fed.executors.graph_lanes import GRAPH_STEPS, GraphLane
from fastsam.fed.executors.lane_rows import LaneRows
from fastsam.fed.executors.memory_errors import name_slots
from fastsam.fed.executors.randomness import LaneRandomness
from fastsam.fed.executors.stacked_client import runs
from fastsam.fed.executors.streams import LaneExecutor, tensors
from fastsam.fed.executors.task import Setup, Task, sort_of
from fastsam.fed.update.passes import PassesOfBeginning
from fastsam.fed.update.results import ClientResults


class Graph(LaneExecutor[GraphLane]):
    """One `GraphLane` per slot.

    A graph holds up to `GRAPH_STEPS` steps of one lane. It is captured once per lane, key of the step and shape, not
    per round. A partial batch has a graph of its shape. Steps that are copied for a measure, the first steps of a sort,
    and sorts beyond the number of graphs that a lane keeps run without a graph. Without a store of samples a graph has
    one step.

    A graph has the values of its capture. A model or loss that reads values on the host (`item()`, `if` on a tensor),
    draws random numbers on the host, or changes its Python state in a pass is refused (`capture_trial`). Random numbers
    of the device are drawn at seeds and offsets that each replay gets, from a state of the lane.
    """

    name = "graph"
    refills_first = True
    default_slots = 16  # on an H200 a CNN's round of 100 clients takes 17.8 ms, with 8 slots 21.4 and with 31 16.8

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.slots = min(self.slots, setup.cohort or self.slots)
        with name_slots(self.slots):
            self.rows = LaneRows(setup, self.slots, GRAPH_STEPS * setup.options.batch_size)

    @staticmethod
    def why_not(setup: Setup) -> str | None:
        """See `LaneExecutor.why_not`."""
        return refusal(setup) or streams.why_not(setup) or why_not_captured(setup, streams.Cuda(setup.device))

    def _new_lane(self, slot: int) -> GraphLane:
        draws = self.setup.draws is not None
        random = LaneRandomness(self.setup.device, self.cuda) if draws else self.random
        return GraphLane(self.setup, random, self.cuda, self.rows, slot)

    def _open(self, opened: Iterable[tuple[GraphLane, Task]], start: Tensor, buffers: Sequence[Tensor]) -> None:
        lanes = []
        for lane, task in opened:
            lane.call(lane.set_task, task, start, buffers)
            if lane.error is None:
                lanes.append(lane)
        for group in self._neighbours(lanes):
            self.rows.begin(group[0].slot, group, start, _LanePasses(group))
        if not lanes:
            return
        event = self.cuda.current().record_event()
        for lane in lanes:
            lane.stream.wait_event(event)
            lane.batches = lane.task.work.batches()

    def _close(self, lanes: Sequence[GraphLane]) -> list[ClientResults]:
        current, parts = self.cuda.current(), []
        for lane in lanes:
            current.wait_stream(lane.stream)
        for group in self._neighbours([lane for lane in lanes if lane.error is None]):
            parts.append(self.rows.results(group[0].slot, group))
            self.cuda.record_stream(tensors(parts[-1]), current)
        return parts

    @staticmethod
    def _neighbours(lanes: Sequence[GraphLane]) -> list[Sequence[GraphLane]]:
        """Return lanes in groups of neighbours whose steps are of one sort."""
        keys = [(lane.slot - i, sort_of(lane.task.step)) for i, lane in enumerate(lanes)]
        return [lanes[part] for part in runs(keys)]

    def release(self) -> None:
        """See `Executor.release`. All graphs are released together (see `Cuda.synchronize`)."""
        self.cuda.synchronize()
        for lane in self.lanes:
            lane.steps_by_key.clear()


class _LanePasses(PassesOfBeginning):
    """The passes of neighbouring lanes before their first step, each on its own stream (see
    `fastsam.fed.update.passes.Passes`)."""

    def __init__(self, lanes: Sequence[GraphLane]) -> None:
        self._lanes = lanes

    def first(self, batches: int) -> tuple[Tensor, Tensor]:
        """See `Passes.first`."""
        gradients, norms = zip(*self._run(lambda lane: lane.first(batches)), strict=True)
        return torch.cat(gradients), torch.cat(norms)

    def all(self) -> Tensor:
        """See `Passes.all`."""
        return torch.cat([gradient for gradient, *_ in self._run(lambda lane: (lane.all(),))])

    def _run(self, work: Callable[[GraphLane], tuple[Tensor, ...]]) -> list[tuple[Tensor, ...]]:
        """Return the tensors of all lanes, ready on the caller's stream. A client that is excluded has zeros."""
        results = []
        for lane in self._lanes:
            cuda, current = lane.cuda, lane.cuda.current()
            lane.stream.wait_stream(current)
            with cuda.use(lane.stream):
                lane.random.begin(lane.task)  # a model may draw in these passes too
                parts = lane.call(work, lane)
                if parts is None:
                    parts = torch.zeros_like(lane.z), lane.z.new_zeros(1, 1, dtype=torch.float64)
            current.wait_stream(lane.stream)
            results.append(parts)
            cuda.record_stream(parts, current)
        return results
