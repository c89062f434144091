"""Clients on CUDA streams, one per slot: small clients leave most of a GPU idle, several of them fill it."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Any, ClassVar, TypeVar

from torch import Tensor

from fastsam.fed.executors.base import ClientError, ClientOutcome, Executor, excludes
from fastsam.fed.executors.client_trainer import ClientTrainer
from fastsam.fed.executors.cuda import Cuda, group_by_fields, join_results, tensors, vectors
from fastsam.fed.executors.local_work import run_loop
from fastsam.fed.executors.memory_errors import name_slots
from fastsam.fed.executors.randomness import NoRandomness, PassRandomness
from fastsam.fed.executors.task import Setup, Task
from fastsam.fed.update.results import ClientResults

log = logging.getLogger("fastsam.fed")
T = TypeVar("T")


class Lane:
    """A slot: a row and its stream.

    Attributes:
        busy: a client was opened and not closed yet.
        error: error of a client that is excluded.
    """

    def __init__(self, row: ClientTrainer, cuda: Cuda) -> None:
        self.row, self.cuda, self.stream, self.busy = row, cuda, cuda.stream(), False
        self.error: ClientError | None = None

    def call(self, work: Callable[..., T], *operands: Any) -> T | None:
        """Return `work` of the operands, or None if it raised the error of a client that is excluded."""
        try:
            return work(*operands)
        except ClientError as error:
            if not excludes(self.row.setup, error):
                raise
            self.error = error
            return None


class StreamLane(Lane):
    """A lane whose client trains step by step."""

    def __init__(self, row: ClientTrainer, cuda: Cuda) -> None:
        super().__init__(row, cuda)
        self.results: ClientResults | None = None  # results of a loop of the algorithm

    def open(self, task: Task, start: Tensor, buffers: Sequence[Tensor]) -> None:
        """Begin a client after the work that the caller's stream has queued (its vectors, the start)."""
        self.stream.wait_stream(self.cuda.current())
        self.cuda.record_stream(vectors(task), self.stream)
        self.busy, self.error, self.results = True, None, None
        with self.cuda.use(self.stream):
            self.call(self.row.open, task, start, buffers)

    def step(self) -> bool:
        """Queue one local step, or a whole loop of the algorithm. Return False if there was none left."""
        if self.error is not None:
            return False
        with self.cuda.use(self.stream):
            if self.row.task.loop is not None:
                self.results = self.call(run_loop, self.row, self.row.task.loop)
                return False
            return bool(self.call(self._next_step))

    def _next_step(self) -> bool:
        with self.row.client_errors:
            batch = next(self.row.batches, None)
            if batch is not None:
                self.row.note_loss(self.row.run_step(*batch), self.row.batch_sizes[self.row.k - 1])
        return batch is not None

    def close(self) -> ClientResults:
        """Return the results of the client, ready on the caller's stream."""
        with self.cuda.use(self.stream):
            results = self.results or self.row.results()
        self.busy, self.results = False, None
        current = self.cuda.current()
        current.wait_stream(self.stream)
        self.cuda.record_stream(tensors(results), current)
        return results


def why_not(setup: Setup) -> str | None:
    """Return the reason why streams cannot serve a run, or None."""
    if setup.device.type != "cuda":
        return f"it runs on CUDA devices, the run is on the {setup.device.type.upper()}"
    return None


class LaneExecutor(Executor):
    """The base class of executors that train clients in lanes, one for each slot.

    Joins are events. A row computes what the plain executor computes, in the same order: the bits are the same. A model
    that draws random numbers (dropout) has the numbers of the plain executor. The host queues one pass after the other,
    and a kernel gets the seed and the offset of the generator when it is queued.

    Raises:
        ValueError: the device is not a CUDA device.
    """

    longest_first = True
    default_slots: ClassVar[int] = 8  # torch has 32 streams and then repeats the first

    def __init__(self, setup: Setup) -> None:
        reason = self.why_not(setup)
        if reason is not None:
            raise ValueError(f"executor {self.name!r} cannot serve here: {reason}. Use executor='sequential'")
        self.setup, self.slots = setup, setup.options.slots or self.default_slots
        self.cuda = Cuda(setup.device)
        self.random = NoRandomness(setup.device) if setup.draws is None else PassRandomness(setup.device, draws=True)

    @staticmethod
    def why_not(setup: Setup) -> str | None:
        """Return the reason why it cannot serve a run, or None."""
        return why_not(setup)

    @property
    @abstractmethod
    def lanes(self) -> Sequence[Lane]:
        """The lanes that were needed so far, in the order of the slots."""

    def train(self, start: Tensor, buffers: Sequence[Tensor], tasks: Iterable[Task]) -> Generator[ClientOutcome]:
        """See `Executor.train`."""
        with self.random.preserve_states():
            try:
                yield from self._outcomes(start, buffers, iter(tasks))
            except Exception:
                try:
                    self._end_round()
                # after a failed capture some streams cannot be waited for; the reason of the failure is raised
                except RuntimeError as problem:
                    log.info("the lanes of a round that failed could not be waited for: %s", problem)
                raise
            except BaseException:
                self._end_round()
                raise
            self._end_round()

    def _end_round(self) -> None:
        """End a round, also in the middle: queued work ends before its memory is used again."""
        for lane in self.lanes:
            lane.busy = False
            self.cuda.current().wait_stream(lane.stream)

    @abstractmethod
    def _outcomes(self, start: Tensor, buffers: Sequence[Tensor], tasks: Iterator[Task]) -> Iterator[ClientOutcome]:
        """Yield the outcomes of a round. See `Executor.train`."""

    def _join(self, parts: Iterable[ClientResults]) -> Iterator[ClientResults]:
        """Yield results that have the same fields together: their numbers are read once."""
        for group in group_by_fields(parts):
            results = join_results(group)
            self.random.check(results.client_ids[0])
            yield results


class Streams(LaneExecutor):
    """One `ClientTrainer` and one stream per slot. The host queues a step of every client in turn and waits for none
    of them inside an epoch."""

    name = "streams"

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self._lanes: list[StreamLane] = []

    @property
    def lanes(self) -> Sequence[StreamLane]:
        """See `LaneExecutor.lanes`."""
        return self._lanes

    def _outcomes(self, start: Tensor, buffers: Sequence[Tensor], tasks: Iterator[Task]) -> Iterator[ClientOutcome]:
        has_tasks = True
        while True:
            for slot in range(self.slots):
                if has_tasks and not (slot < len(self._lanes) and self._lanes[slot].busy):
                    task = next(tasks, None)
                    if task is None:
                        has_tasks = False
                    else:
                        with name_slots(self.slots):
                            self._lane(slot).open(task, start, buffers)
            busy = [lane for lane in self._lanes if lane.busy]
            if not busy:
                return
            # Lanes that end together are one group: its numbers are read once, and all of them are free for the next
            # clients at once.
            finished_lanes = [lane for lane in busy if not lane.step()]
            for lane in finished_lanes:
                if lane.error is not None:
                    lane.busy = False
                    yield lane.error
            yield from self._join([lane.close() for lane in finished_lanes if lane.error is None])

    def _lane(self, slot: int) -> StreamLane:
        """Return a lane, which is made when it is first needed."""
        if slot == len(self._lanes):
            self._lanes.append(StreamLane(ClientTrainer(self.setup, self.random), self.cuda))
        return self._lanes[slot]
