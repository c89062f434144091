"""Clients on a pool of threads, each in its own row, with one intra-op thread each: the bits of the plain executor."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from queue import Empty, SimpleQueue

import torch
from torch import Tensor

from fastsam.fed.executors.base import ClientError, ClientOutcome, Executor, excludes
from fastsam.fed.executors.client_trainer import ClientTrainer
from fastsam.fed.executors.local_work import train
from fastsam.fed.executors.randomness import NoRandomness, OwnRandomness
from fastsam.fed.executors.task import Setup, Task
from fastsam.fed.update.results import ClientResults

_POLL_SECONDS = 0.1  # seconds between two looks for Ctrl-C
# Tasks per slot: one in work, and one for a thread that finishes while the receiver is busy.
_QUEUED_PER_SLOT = 2


def cpus() -> int:
    """Return the number of CPUs that this process may use: its share, if torchrun started several on this machine."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, count // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


class Threads(Executor):
    """A `ClientTrainer` per thread, each with its own deep copy of the model. Autograd runs a CPU backward pass in the
    calling thread.

    Results come in the order in which clients finish. An error in one client, Ctrl-C, or a receiver that leaves stops
    all threads after their current local step. A model that draws random numbers (dropout) draws the same numbers, from
    a generator of its thread.

    Raises:
        ValueError: the device is not the CPU; reading the data draws random numbers; or it is unknown which function of
            the model draws (none of torch's functions, or the backward pass).
    """

    name = "threads"
    longest_first = True

    def __init__(self, setup: Setup) -> None:
        reason = why_not(setup)
        if reason is not None:
            raise ValueError(f"executor {self.name!r} cannot serve here: {reason}. Use executor='sequential'")
        self.setup, self.slots = setup, setup.options.slots or cpus()
        self.random = NoRandomness(setup.device)
        self.rows: list[ClientTrainer] = []

    def train(self, start: Tensor, buffers: Sequence[Tensor], tasks: Iterable[Task]) -> Generator[ClientOutcome]:
        """See `Executor.train`."""
        stop, free = threading.Event(), list(self.rows)

        def work(task: Task) -> ClientResults:
            row = free.pop()
            try:
                with row.random.generator_context():
                    return train(row, task, start, buffers, stop.is_set)
            finally:
                free.append(row)

        with self.random.preserve_states():
            # A thread begins with its own count of threads inside an operation.
            pool = ThreadPoolExecutor(self.slots, "fastsam client", torch.set_num_threads, (1,))
            try:
                yield from self._outcomes(lambda task: pool.submit(work, task), free, iter(tasks))
            finally:
                stop.set()
                pool.shutdown(cancel_futures=True)

    def _outcomes(
        self, submit: Callable[[Task], Future[ClientResults]], free: list[ClientTrainer], tasks: Iterator[Task]
    ) -> Generator[ClientOutcome]:
        """Yield the outcomes of tasks in the order in which clients finish. `free` are the rows without a client."""
        ended, out = SimpleQueue[Future[ClientResults]](), 0
        while True:
            for task in islice(tasks, _QUEUED_PER_SLOT * self.slots - out):
                out += 1
                if len(self.rows) < min(out, self.slots):  # a small cohort costs no more than its clients
                    free.append(self._new_row())
                submit(task).add_done_callback(ended.put)
            if not out:
                return
            try:
                # Ctrl-C comes out here, also if another thread received the signal, because Python handles it in this
                # thread after a wait.
                future = ended.get(timeout=_POLL_SECONDS)
            except Empty:
                continue
            out -= 1
            yield self._outcome_of(future)

    def _outcome_of(self, future: Future[ClientResults]) -> ClientOutcome:
        """Return the results of a client that has ended, or the error for which it is excluded. Raises other errors."""
        try:
            results = future.result()
        except ClientError as error:
            if not excludes(self.setup, error):
                raise
            return error
        self.random.check(results.client_ids[0])
        return results

    def _new_row(self) -> ClientTrainer:
        calls = self.setup.draws
        self.rows.append(ClientTrainer(self.setup, self.random if calls is None else OwnRandomness(calls)))
        return self.rows[-1]


def why_not(setup: Setup) -> str | None:
    """Return the reason why threads cannot train this, or None."""
    if setup.device.type != "cpu":
        return f"it runs on the CPU, the run on {setup.device}"
    if setup.population.clients.draws:
        return (
            "reading a batch draws random numbers from generators that are one for all clients that train at the same "
            "time"
        )
    return None if setup.draws is None or setup.draws else NoRandomness.REASON
