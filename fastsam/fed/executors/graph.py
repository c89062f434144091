"""Captured local steps: one CUDA graph for a step of all slots, replayed. The host then queues one thing where it
queued thousands."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import torch
from torch import Tensor

from fastsam.fed.executors import streams
from fastsam.fed.executors.base import refusal
from fastsam.fed.executors.client_trainer import ClientTrainer
from fastsam.fed.executors.cuda import Cuda
from fastsam.fed.executors.gradient_passes import Passes
from fastsam.fed.executors.randomness import PassRandomness
from fastsam.fed.executors.recording import difference, python_state
from fastsam.fed.executors.streams import Lane, Streams
from fastsam.fed.executors.task import Setup, Task
from fastsam.fed.update.local_update import ClientResults
from fastsam.fed.update.model_copy import Replica

_EAGER_STEPS = 2  # steps before a capture, because libraries set up on first use and that cannot be captured
_ALIGNMENT = {"cpu": 64, "cuda": 256}  # bytes: how finely libraries look at where a tensor begins
Batch = tuple[Tensor, Tensor]


class CapturableTrainer(ClientTrainer):
    """A row whose steps read and write the same memory every time, so that they can be captured.

    Batches are copied into fixed inputs, one pair per shape; vectors into fields. The losses of the steps go to a
    buffer, at an index from a counter on the device. Learning rate, rho and other numbers are device data in any row.
    The methods run on the row's stream, so that their memory belongs to it.
    """

    def __init__(self, setup: Setup, random: PassRandomness) -> None:
        super().__init__(setup, random, copies=True)
        self.counter = torch.zeros(1, dtype=torch.int64, device=setup.device)
        self.loss_buffer: Tensor | None = None  # losses, in the order of the steps
        self.places = torch.zeros(0, dtype=torch.int64, device=setup.device)  # 0, 1, ...: one for each of them
        self.inputs: dict[Hashable, Batch] = {}

    def open(self, task: Task, start: Tensor, buffers: Sequence[Tensor]) -> None:
        super().open(task, start, buffers)
        self.counter.zero_()

    def _make_room(self, dtype: torch.dtype) -> None:
        """Allocate a buffer for the losses of a client, long enough for every client of the run."""
        options, sizes = self.setup.options, self.setup.population.clients.sizes
        steps = options.local_steps or options.local_epochs * -(-max(sizes) // options.batch_size)
        self.loss_buffer = torch.zeros(steps, dtype=dtype, device=self.z.device)
        self.places = torch.arange(steps, device=self.z.device)

    def step(self, x: Tensor, y: Tensor) -> None:
        super().step(x, y)
        loss = self.losses.pop()
        if self.loss_buffer is None:
            self._make_room(loss.dtype)
        assert self.loss_buffer is not None
        torch.where(self.places == self.counter, loss, self.loss_buffer, out=self.loss_buffer)
        self.counter.add_(1)

    def close(self) -> ClientResults:
        assert self.loss_buffer is not None  # a client has a step at least
        self.losses = list(self.loss_buffer[: self.k].unbind())
        return super().close()

    def static(self, batch: Batch) -> Batch:
        """Return the fixed inputs of the shape of `batch`."""
        key = shape_of(batch)
        if key not in self.inputs:
            self.inputs[key] = (_like(batch[0]), _like(batch[1]))
        return self.inputs[key]


def shape_of(batch: Batch) -> Hashable:
    """Return the properties that two batches must share to have one pair of inputs. Libraries' rounding depends on
    them. The address of the labels is left out, because each of its 16 alignments would have separate graphs."""
    return tuple((t.shape, t.stride(), t.dtype, _offset(t) if t.is_floating_point() else 0) for t in batch)


def _offset(t: Tensor) -> int:
    return t.data_ptr() % _ALIGNMENT[t.device.type]


def fills(t: Tensor) -> bool:
    """Return True if no two elements share memory, as after `expand`. Then it can be copied into."""
    return all(stride > 0 or size <= 1 for size, stride in zip(t.shape, t.stride(), strict=True))


def _like(t: Tensor) -> Tensor:
    """Return memory that is laid out as `t`, and as far from a multiple of the alignment."""
    size, alignment = t.element_size(), _ALIGNMENT[t.device.type]
    extent = 1 + sum((n - 1) * stride for n, stride in zip(t.shape, t.stride(), strict=True))
    raw = torch.empty(extent + 2 * alignment // size, dtype=t.dtype, device=t.device)
    begin = (_offset(t) - _offset(raw)) % alignment // size
    return raw.as_strided(t.shape, t.stride(), begin)


class CudaGraphCache:
    """The captured steps by sort. The first steps of every sort run without a graph."""

    def __init__(self, cuda: Cuda) -> None:
        self.cuda = cuda
        self.graphs, self.eager_counts = dict[Hashable, torch.cuda.CUDAGraph](), dict[Hashable, int]()

    def find(self, key: Hashable) -> torch.cuda.CUDAGraph | None:
        return self.graphs.get(key)

    def should_capture(self, key: Hashable) -> bool:
        """Return True if enough steps of this sort were taken to capture one."""
        self.eager_counts[key] = self.eager_counts.get(key, 0) + 1
        return self.eager_counts[key] > _EAGER_STEPS

    def capture(self, key: Hashable, work: Callable[[], None], stream: torch.cuda.Stream) -> torch.cuda.CUDAGraph:
        """Return the graph of a step of this sort, which is captured now."""
        graph = self.graphs[key] = self.cuda.capture(work, stream)
        return graph

    def release(self) -> None:
        """Release all graphs at the end of a run."""
        self.cuda.synchronize()
        self.graphs.clear()


class Graph(Streams):
    """`Streams` with captured steps.

    If the clients in the first slots have steps of one sort (equal kernels and shapes) and no other client trains, one
    graph holds the steps of all of them, forked over their streams. Otherwise each row replays its own graph on its own
    stream. A graph is captured once per sort, not per round. A partial batch has a graph of its shape. Steps that are
    copied for a measure run without a graph.

    A graph has the values of its capture. A model or loss that reads values on the host (`item()`, `if` on a tensor)
    raises. A model that counts its calls in Python, or branches on such a count, would be frozen without an error.
    """

    name = "graph"

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.graphs = CudaGraphCache(self.cuda)
        self.joint = self.cuda.stream()  # where graphs of all rows run

    @staticmethod
    def why_not(setup: Setup) -> str | None:
        reason = refusal(setup)
        if reason is not None:
            return reason
        if setup.options.on_client_error == "exclude":
            return (
                "on_client_error='exclude' leaves out a client that raises, and one graph holds the step of several; "
                "'streams' can"
            )
        return Streams.why_not(setup) or unsupported(setup) or why_not_captured(setup, streams.Cuda(setup.device))

    def make_row(self) -> ClientTrainer:
        return CapturableTrainer(self.setup, self.random)

    def step(self, busy: Sequence[Lane]) -> list[Lane]:
        ready, finished_lanes = [], []
        for lane in busy:
            with self.cuda.use(lane.stream), lane.row.client_errors:
                batch = next(lane.row.batches, None)
                if batch is not None and lane.row.rows.variant.has_schedule:
                    lane.row.set_schedule()
            if batch is None:
                finished_lanes.append(lane)
            else:
                ready.append((lane, batch))
        sorts = {self._sort(lane, batch) for lane, batch in ready}
        if len(sorts) == 1 and len(ready) > 1 and None not in sorts and self._first([lane for lane, _ in ready]):
            self._joint_step(ready, ("all", len(ready), *sorts))
        else:
            for lane, batch in ready:
                self._own_step(lane, batch)
        for lane, _ in ready:
            lane.row.k += 1
        return finished_lanes

    def _first(self, lanes: Sequence[Lane]) -> bool:
        """Return True if these are the first lanes. Only they have a joint graph."""
        return all(a is b for a, b in zip(lanes, self.lanes, strict=False))

    def _sort(self, lane: Lane, batch: Batch) -> Hashable:
        """Return the properties that steps of one graph must share, or None for a step that is not captured."""
        row = lane.row
        assert isinstance(row, CapturableTrainer)
        keeps_snapshot = row.k in row.task.snapshots or not all(map(fills, batch))
        return None if keeps_snapshot else (row.rows.variant, shape_of(batch))

    def _own_step(self, lane: Lane, batch: Batch) -> None:
        row, sort = lane.row, self._sort(lane, batch)
        assert isinstance(row, CapturableTrainer)
        with self.cuda.use(lane.stream), row.client_errors:
            if sort is None:
                row.step(*batch)
                return
            self._copy([(row, batch)])
            inputs = row.static(batch)
            self._replay((row, sort), lambda: row.step(*inputs), lane.stream)

    def _joint_step(self, ready: Sequence[tuple[Lane, Batch]], key: Hashable) -> None:
        for lane, _ in ready:
            self.joint.wait_stream(lane.stream)
        with self.cuda.use(self.joint):
            self._copy([(lane.row, batch) for lane, batch in ready])
            self._replay(key, lambda: self._step_lanes(ready), self.joint)
        # A batch is memory of its lane's stream, which must not use it again before it was read here.
        for lane, _ in ready:
            lane.stream.wait_stream(self.joint)

    def end_round(self) -> None:
        self.cuda.current().wait_stream(self.joint)
        super().end_round()

    def release(self) -> None:
        """See `Executor.release`."""
        self.graphs.release()

    def _replay(self, key: Hashable, work: Callable[[], None], stream: torch.cuda.Stream) -> None:
        """Do the work of a step on `stream`, from its graph if there is one or if it is time for one."""
        graph = self.graphs.find(key)
        if graph is None and self.graphs.should_capture(key):
            graph = self.graphs.capture(key, work, stream)
        if graph is None:
            work()
        else:
            graph.replay()

    def _step_lanes(self, ready: Sequence[tuple[Lane, Batch]]) -> None:
        """Take a step of every row on its own stream, between a fork from the joint stream and a join to it.

        All streams fork before the first one joins. A stream that forks after a join waits for the joined step, so that
        the steps would run one after another.
        """
        for lane, _ in ready:
            lane.stream.wait_stream(self.joint)
        for lane, batch in ready:
            row = lane.row
            assert isinstance(row, CapturableTrainer)
            with self.cuda.use(lane.stream), row.client_errors:
                row.step(*row.static(batch))
        for lane, _ in ready:
            self.joint.wait_stream(lane.stream)

    @staticmethod
    def _copy(pairs: Sequence[tuple[ClientTrainer, Batch]]) -> None:
        """Copy the batches into the rows' inputs, all of one dtype in one launch."""
        for part in (0, 1):
            inputs = [row.static(batch)[part] for row, batch in pairs if isinstance(row, CapturableTrainer)]
            torch._foreach_copy_(inputs, [batch[part] for _, batch in pairs])


def unsupported(setup: Setup) -> str | None:
    """Return the reason why batches or random numbers of a run are not served, or None."""
    if setup.population.batch_reason:
        return f"{setup.population.batch_reason}; 'streams' can"
    if setup.draws is not None:
        return "a training pass of the model draws random numbers (dropout?), and a capture freezes them; 'streams' can"
    return None


def why_not_captured(setup: Setup, cuda: Cuda) -> str | None:
    """Return the reason why a step cannot be captured, or None. Without an example batch to try the result is None."""
    trial = _trial(setup)
    if trial is None:
        return None
    _, run = trial
    try:
        with cuda.no_wait():
            run()
    except RuntimeError as error:
        return f"the model or the loss looks at values on the host ({str(error).strip().splitlines()[0]})"
    return None


def changes_python(setup: Setup) -> str | None:
    """Return a description of the Python state of the model that a pass changes, buffers aside, or None. A captured
    step would freeze it."""
    trial = _trial(setup)
    if trial is None:
        return None
    replica, run = trial
    buffers = dict(replica.module.named_buffers())

    def state() -> dict[str, object]:
        return {name: value for name, value in python_state(replica.module).items() if name not in buffers}

    old_state = state()
    run()
    return difference(old_state, state())


def _trial(setup: Setup) -> tuple[Replica, Callable[[], object]] | None:
    """Return a copy of the model in training mode, because a capture that fails ends the run, and a pass of it on the
    example batch, after the first pass, in which libraries are set up."""
    if setup.example is None:
        return None
    x, y = setup.example
    replica = Replica.new(setup.model, setup.layout, setup.device)
    replica.module.train()
    passes = Passes(replica, setup.layout, setup.loss)
    passes.run(x, y)
    return replica, lambda: passes.run(x, y)
