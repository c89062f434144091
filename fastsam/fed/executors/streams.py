"""Clients on CUDA streams, one per slot: small clients leave most of a GPU idle, several of them fill it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Generator, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor

from fastsam.fed.executors.base import ClientError, ClientOutcome, Executor, excludes
from fastsam.fed.executors.client_trainer import ClientTrainer
from fastsam.fed.executors.cuda import Cuda
from fastsam.fed.executors.local_work import run_loop
from fastsam.fed.executors.memory_errors import name_slots
from fastsam.fed.executors.randomness import NoRandomness, PassRandomness
from fastsam.fed.executors.task import Setup, Task
from fastsam.fed.update.results import ClientResults
from fastsam.fed.update.rows import Rows

T = TypeVar("T")


class Lane(ClientTrainer):
    """A slot: a trainer, and the stream on which its clients train.

    Attributes:
        is_busy: a client was opened and not closed yet.
        error: error of a client that is excluded.
        loop_results: results of a loop of the algorithm.
    """

    def __init__(self, setup: Setup, random: PassRandomness, cuda: Cuda, rows: Rows | None = None) -> None:
        super().__init__(setup, random, rows)
        self.cuda, self.stream, self.is_busy = cuda, cuda.stream(), False
        self.error: ClientError | None = None
        self.loop_results: ClientResults | None = None

    def call(self, work: Callable[..., T], *operands: Any) -> T | None:
        """Return `work` of the operands, or None if it raised the error of a client that is excluded."""
        try:
            return work(*operands)
        except ClientError as error:
            if not excludes(self.setup, error):
                raise
            self.error = error
            return None

    def queue_steps(self) -> bool:
        """Queue the next local steps on the stream. Return False if none is left."""
        if self.error is not None:
            return False
        with self.cuda.use(self.stream):
            return bool(self.call(self.take_steps))

    def take_steps(self) -> bool:
        """Take the next local step, or a whole loop of the algorithm. Return False if no step was left."""
        if self.task.loop is not None:
            self.loop_results = run_loop(self, self.task.loop)
            return False
        with self.client_errors:
            batch = next(self.batches, None)
            if batch is not None:
                self.note_loss(self.run_step(*batch), self.batch_sizes[self.k - 1])
        return batch is not None


AnyLane = TypeVar("AnyLane", bound=Lane)


def why_not(setup: Setup) -> str | None:
    """Return the reason why streams cannot serve a run, or None."""
    if setup.device.type != "cuda":
        return f"it runs on CUDA devices, the run is on the {setup.device.type.upper()}"
    return None


class LaneExecutor(Executor, Generic[AnyLane]):
    """The base class of executors that train clients in lanes, one for each slot.

    Joins are events. A lane computes what the plain executor computes, in the same order: the bits are the same. A
    model that draws random numbers (dropout) has the numbers of the plain executor. The host queues one pass after the
    other, and a kernel gets the seed and the offset of the generator when it is queued.

    Attributes:
        lanes: the lanes that were needed so far, in the order of the slots.
        refills_first: lanes that ended are opened again, and their steps are queued, before results are yielded,
            because the receiver waits for the device. A loop may return views of its lane's memory, so that its results
            must be received first.

    Raises:
        ValueError: the device is not a CUDA device.
    """

    longest_first = True
    refills_first: ClassVar[bool] = False
    default_slots: ClassVar[int] = 8  # torch has 32 streams and then repeats the first

    def __init__(self, setup: Setup) -> None:
        reason = self.why_not(setup)
        if reason is not None:
            raise ValueError(f"executor {self.name!r} cannot serve here: {reason}. Use executor='sequential'")
        self.setup, self.slots = setup, setup.options.slots or self.default_slots
        self.cuda, self.lanes = Cuda(setup.device), list[AnyLane]()
        self.random = NoRandomness(setup.device) if setup.draws is None else PassRandomness(setup.device, draws=True)

    @staticmethod
    def why_not(setup: Setup) -> str | None:
        """Return the reason why it cannot serve a run, or None."""
        return why_not(setup)

    def train(self, start: Tensor, buffers: Sequence[Tensor], tasks: Iterable[Task]) -> Generator[ClientOutcome]:
        """See `Executor.train`."""
        with self.random.preserve_states():
            try:
                yield from self._outcomes(start, buffers, iter(tasks))
            except BaseException:
                with suppress(RuntimeError):  # after a failed capture some streams cannot be waited for
                    self._end_round()
                raise
            self._end_round()

    def _end_round(self) -> None:
        """End a round, also in the middle: queued work ends before its memory is used again."""
        for lane in self.lanes:
            lane.is_busy = False
            self.cuda.current().wait_stream(lane.stream)

    def _outcomes(self, start: Tensor, buffers: Sequence[Tensor], tasks: Iterator[Task]) -> Iterator[ClientOutcome]:
        """Yield the outcomes of a round."""
        finished_lanes: list[AnyLane] = []
        while True:
            errors = [lane.error for lane in finished_lanes if lane.error is not None]
            outcomes = self._join(errors, self._close(finished_lanes))
            if not self.refills_first:
                yield from outcomes
            with name_slots(self.slots):
                self._open(self._assign(tasks), start, buffers)
            busy = [lane for lane in self.lanes if lane.is_busy]
            finished_lanes = [lane for lane in busy if not lane.queue_steps()]
            for lane in finished_lanes:
                lane.is_busy = False
            yield from outcomes  # already empty if they were received first
            if not busy:
                return

    def _join(self, errors: Iterable[ClientError], parts: Iterable[ClientResults]) -> Iterator[ClientOutcome]:
        """Yield errors, and results that have the same fields together: their numbers are read once."""
        yield from errors
        for group in group_by_fields(parts):
            results = join_results(group)
            self.random.check(results.client_ids[0])
            yield results

    def _assign(self, tasks: Iterator[Task]) -> Iterator[tuple[AnyLane, Task]]:
        """Yield the free lanes, each with its next task, until there are no more tasks. A lane is made when it is first
        needed."""
        free = [slot for slot in range(self.slots) if slot >= len(self.lanes) or not self.lanes[slot].is_busy]
        for slot, task in zip(free, tasks, strict=False):
            if slot == len(self.lanes):
                self.lanes.append(self._new_lane(slot))
            lane = self.lanes[slot]
            lane.is_busy, lane.error = True, None
            yield lane, task

    @abstractmethod
    def _new_lane(self, slot: int) -> AnyLane: ...

    @abstractmethod
    def _open(self, opened: Iterable[tuple[AnyLane, Task]], start: Tensor, buffers: Sequence[Tensor]) -> None:
        """Begin clients in lanes, after the work that the caller's stream has queued (their vectors, the start)."""

    @abstractmethod
    def _close(self, lanes: Sequence[AnyLane]) -> list[ClientResults]:
        """Return the results of clients that ended and are not excluded, ready on the caller's stream."""


class Streams(LaneExecutor[Lane]):
    """One `Lane` per slot. The host queues a step of every client in turn and waits for none of them inside an
    epoch."""

    name = "streams"

    def _new_lane(self, slot: int) -> Lane:
        return Lane(self.setup, self.random, self.cuda)

    def _open(self, opened: Iterable[tuple[Lane, Task]], start: Tensor, buffers: Sequence[Tensor]) -> None:
        for lane, task in opened:
            lane.stream.wait_stream(self.cuda.current())
            self.cuda.record_stream(vectors(task), lane.stream)
            with self.cuda.use(lane.stream):
                lane.call(lane.open, task, start, buffers)

    def _close(self, lanes: Sequence[Lane]) -> list[ClientResults]:
        current, parts = self.cuda.current(), []
        for lane in lanes:
            if lane.error is None:
                with self.cuda.use(lane.stream):
                    parts.append(lane.loop_results or lane.results())
                lane.loop_results = None
                current.wait_stream(lane.stream)
                self.cuda.record_stream(tensors(parts[-1]), current)
        return parts


def vectors(task: Task) -> list[Tensor]:
    """Return the tensors that the local work of a client reads, in its step and in a loop."""
    step, of_loop = task.step, () if task.loop is None else task.loop.tensors
    numbers = [x for x in step.numbers().values() if isinstance(x, Tensor)]
    return [*step.tensors.values(), *numbers, *(step.buffers or ()), *(step.state or {}).values(), *of_loop]


def tensors(results: ClientResults) -> list[Tensor]:
    """Return the tensors of a ClientResults on the device."""
    snapshots = [s for by_step in results.snapshots or () for s in by_step.values()]
    values = [*vars(results).values(), *named_tensors(results).values(), *(t for s in snapshots for t in (s.w, s.eps))]
    return [t for t in values if isinstance(t, Tensor) and t.device.type != "cpu"]


def named_tensors(results: ClientResults) -> dict[tuple[str, str], Tensor]:
    """Return the tensors of a ClientResults that have names, by field and name."""
    mappings = {"extra": results.extra, "outputs": results.outputs, "state": results.optimizer_state or {}}
    return {(field, name): x for field, mapping in mappings.items() for name, x in mapping.items()}


def join_results(parts: Sequence[ClientResults]) -> ClientResults:
    """Return the results of clients as one group, in order. A field must be None for all of them or for none."""

    def join(values: list[Any]) -> Any:
        if len(values) == 1 or values[0] is None:
            return values[0]
        if isinstance(values[0], Tensor):
            return torch.cat(values)
        if isinstance(values[0], Mapping):
            return {name: torch.cat([value[name] for value in values]) for name in values[0]}
        return [x for value in values for x in value]

    return ClientResults(**{f.name: join([getattr(part, f.name) for part in parts]) for f in fields(ClientResults)})


def group_by_fields(parts: Iterable[ClientResults]) -> list[list[ClientResults]]:
    """Return results that have the same fields, in groups."""
    groups: dict[Hashable, list[ClientResults]] = {}
    for part in parts:
        shapes = frozenset((name, x.shape) for name, x in named_tensors(part).items())
        key = shapes, tuple(value is None for value in vars(part).values())
        groups.setdefault(key, []).append(part)
    return list(groups.values())
