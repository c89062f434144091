"""Clients on a pool of threads, each in its own row, with one intra-op thread each: the bits of the plain executor."""

from __future__ import annotations

import os
import threading
from collections.abc import Generator, Iterable, Iterator, Sequence
from queue import Empty, SimpleQueue

import torch
from torch import Tensor

from fastsam.fed.executors.base import ClientError, ClientOutcome, Executor, excludes
from fastsam.fed.executors.client import StopClient
from fastsam.fed.executors.client_trainer import ClientTrainer
from fastsam.fed.executors.local_work import train
from fastsam.fed.executors.randomness import NoRandomness, OwnRandomness
from fastsam.fed.executors.task import Setup, Task
from fastsam.fed.update.results import ClientResults

_POLL_SECONDS = 0.1  # seconds between two looks for Ctrl-C
_QUEUED_PER_SLOT = (
    2  # queued tasks per slot: one in work, and one for a thread that finishes while the receiver is busy
)


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
        with self.random.preserve_states():
            self.random.start_round()
            pool = _ThreadPool(self.setup, start, buffers)
            try:
                yield from self._outcomes(pool, iter(tasks))
            finally:
                pool.stop_all()

    def _outcomes(self, pool: _ThreadPool, tasks: Iterator[Task]) -> Generator[ClientOutcome]:
        has_tasks, out = True, 0
        while True:
            while has_tasks and out < _QUEUED_PER_SLOT * self.slots:
                task = next(tasks, None)
                if task is None:
                    has_tasks = False
                    break
                if len(pool.threads) < self.slots:
                    pool.start_thread(self._row(len(pool.threads)))
                pool.todo.put(task)
                out += 1
            if not out:
                return
            results = pool.next_end()
            out -= 1
            if isinstance(results, BaseException) and not excludes(self.setup, results):
                raise results
            if isinstance(results, ClientResults):
                self.random.check(results.client_ids[0])
            if isinstance(results, (ClientResults, ClientError)):
                yield results

    def _row(self, number: int) -> ClientTrainer:
        """Return a row, which is made when it is first needed: a small cohort costs no more than its clients."""
        if number == len(self.rows):
            calls = self.setup.draws
            self.rows.append(ClientTrainer(self.setup, self.random if calls is None else OwnRandomness(calls)))
        return self.rows[number]


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


class _ThreadPool:
    """The threads of one round."""

    def __init__(self, setup: Setup, start: Tensor, buffers: Sequence[Tensor]) -> None:
        self.setup, self.start, self.buffers = setup, start, buffers
        self.todo: SimpleQueue[Task | None] = SimpleQueue()
        self.results: SimpleQueue[ClientResults | BaseException] = SimpleQueue()
        self.stop = threading.Event()
        self.threads: list[threading.Thread] = []

    def start_thread(self, row: ClientTrainer) -> None:
        thread = threading.Thread(
            target=self._work, args=(row,), name=f"fastsam client {len(self.threads)}", daemon=True
        )
        self.threads.append(thread)
        thread.start()

    def _work(self, row: ClientTrainer) -> None:
        try:
            torch.set_num_threads(1)  # a thread begins with its own count
            while (task := self.todo.get()) is not None:
                if self.stop.is_set():
                    return
                results = self._train(row, task)
                if results is None:
                    return
                self.results.put(results)
        except BaseException as error:
            self.results.put(error)

    def _train(self, row: ClientTrainer, task: Task) -> ClientOutcome | None:
        """Return the results of a client, or None if it was stopped."""
        try:
            with row.random.generator_context():
                return train(row, task, self.start, self.buffers, self.stop.is_set)
        except StopClient:
            return None
        except ClientError as error:
            if not excludes(self.setup, error):
                raise
            return error

    def next_end(self) -> ClientResults | BaseException:
        """Return the results of a client that has ended, or its error. Ctrl-C comes out here, also if another thread
        received the signal, because Python handles it in this thread after a wait."""
        while True:
            try:
                return self.results.get(timeout=_POLL_SECONDS)
            except Empty:
                continue

    def stop_all(self) -> None:
        """End all threads, in the middle of a round after their current step.

        Ctrl-C may have interrupted the start of a thread. Such a thread does nothing when it starts, and it cannot be
        waited for.
        """
        self.stop.set()
        for _ in self.threads:
            self.todo.put(None)
        for thread in self.threads:
            if thread.is_alive():
                thread.join()
