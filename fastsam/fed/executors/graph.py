"""Captured local steps: each lane replays its clients' steps from CUDA graphs. The host then queues one thing where it
queued thousands.

    open      neighbouring lanes begin together, on the caller's stream (Graph._begin); each lane waits for one event
    step      a chunk of steps on the lane's stream: one replay (GraphLane.take_steps)
    close     lanes that ended are joined, and their results are made together (Graph._results)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from fastsam.fed.clients.plan import places_of
from fastsam.fed.common.transfer import to_device
from fastsam.fed.executors import streams
from fastsam.fed.executors.base import refusal
from fastsam.fed.executors.capture_trial import why_not_captured
from fastsam.fed.executors.graph_lanes import GRAPH_STEPS, GraphLane, LaneMemory
from fastsam.fed.executors.memory_errors import name_slots
from fastsam.fed.executors.randomness import LaneRandomness
from fastsam.fed.executors.stacked_client import runs
from fastsam.fed.executors.streams import LaneExecutor, tensors
from fastsam.fed.executors.task import Setup, Task, sort_of, step_of
from fastsam.fed.update.model_copy import buffer_displacement
from fastsam.fed.update.passes import Passes
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
            self.memory = LaneMemory(setup, self.slots, GRAPH_STEPS * setup.options.batch_size)

    @staticmethod
    def why_not(setup: Setup) -> str | None:
        """See `LaneExecutor.why_not`."""
        return refusal(setup) or streams.why_not(setup) or why_not_captured(setup, streams.Cuda(setup.device))

    def _new_lane(self, slot: int) -> GraphLane:
        draws = self.setup.draws is not None
        random = LaneRandomness(self.setup.device, self.cuda) if draws else self.random
        return GraphLane(self.setup, random, self.cuda, self.memory, slot)

    def _open(self, opened: Iterable[tuple[GraphLane, Task]], start: Tensor, buffers: Sequence[Tensor]) -> None:
        lanes = []
        for lane, task in opened:
            lane.call(lane.set_task, task, start, buffers)
            if lane.error is None:
                lanes.append(lane)
        for group in self._neighbours(lanes):
            self._begin(group, start)
        if not lanes:
            return
        event = self.cuda.current().record_event()
        for lane in lanes:
            lane.stream.wait_event(event)
            lane.batches = lane.task.work.batches()

    def _begin(self, lanes: Sequence[GraphLane], w: Tensor) -> None:
        """Begin the tasks of neighbouring lanes, whose steps are of one sort, from the global model `w`."""
        memory, tasks, slot, end = self.memory, [lane.task for lane in lanes], lanes[0].slot, lanes[-1].slot + 1
        if lanes[0].replica.buffers:
            pairs = [pair for lane in lanes for pair in zip(lane.replica.buffers, lane.buffers, strict=True)]
            torch._foreach_copy_([buffer for buffer, _ in pairs], [value for _, value in pairs])
            for lane in lanes:
                lane.teachers.load_buffers(lane.buffers)
        memory.counters[slot:end].zero_()
        if memory.store is not None:
            indices, begins = places_of([task.work for task in tasks], [0] * len(tasks))
            places = zip(begins, [sum(lane.batch_sizes) for lane in lanes], strict=True)
            _write(memory.indices, slot, [indices[begin : begin + count] for begin, count in places])
        key = tasks[0].step.key
        if key.has_rate and memory.schedule is not None:
            counts = [len(lane.batch_sizes) for lane in lanes]
            rates = [[task.lr_of_step(k, n) for k in range(n)] for task, n in zip(tasks, counts, strict=True)]
            _write(memory.schedule, slot, [torch.tensor(row, dtype=torch.float64) for row in rates])
        step_of(tasks).begin(memory.rows.part(slot, end), w, tasks[0].lr, _LanePasses(lanes))
        for lane in lanes:
            lane.rows.select(key)

    def _close(self, lanes: Sequence[GraphLane]) -> list[ClientResults]:
        current, parts = self.cuda.current(), []
        for lane in lanes:
            current.wait_stream(lane.stream)
        for group in self._neighbours([lane for lane in lanes if lane.error is None]):
            parts.append(self._results(group))
            self.cuda.record_stream(tensors(parts[-1]), current)
        return parts

    def _results(self, lanes: Sequence[GraphLane]) -> ClientResults:
        """Return the results of the clients of neighbouring lanes, whose steps are of one sort."""
        first, rows = lanes[0], self.memory.rows.part(lanes[0].slot, lanes[-1].slot + 1)
        rows.select(first.step.key)
        for lane in lanes:
            lane.check_model()
        buffers = [buffer_displacement(x.replica.buffers, x.buffers)[None] for x in lanes if x.replica.buffers]
        has_start = first.task.step.start is not None
        return ClientResults(
            client_ids=[lane.task.client for lane in lanes],
            num_steps=[lane.k for lane in lanes],
            backward_passes=[lane.backward_passes for lane in lanes],
            losses=rows.losses.clone(),
            num_samples=[sum(lane.batch_sizes) for lane in lanes],
            buffers=torch.cat(buffers) if buffers else None,
            snapshots=[lane.snapshots for lane in lanes],
            start=torch.stack([lane.start for lane in lanes]) if has_start else None,
            **rows.results(first.step.state is not None),
        )

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


class _LanePasses(Passes):
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


def _write(field: Tensor, slot: int, rows: Sequence[Tensor]) -> None:
    """Write tensors `[.]` of the host to the rows of a field from `slot` on, in one copy. Shorter ones end in zeros."""
    values = pad_sequence(list(rows), batch_first=True)
    field[slot : slot + len(rows), : values.shape[1]].copy_(to_device(values, field.device))
