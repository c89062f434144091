"""Clients that a thread loads while other clients train."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

T = TypeVar("T")


class Prefetcher(Generic[T]):
    """Loads the next clients in a thread, one after the other. At most `max_loaded` loaded clients wait for their use.

    An error of a load is raised where the client is taken.
    """

    def __init__(self, load: Callable[[int], T]) -> None:
        self._load = load
        self._thread = ThreadPoolExecutor(1, "fastsam loads clients")
        self._queue: deque[int] = deque()
        self._futures: dict[int, Future[T]] = {}
        self._max_loaded = 0

    def prefetch(self, clients: Sequence[int], max_loaded: int) -> None:
        """Announce the clients that will be taken, in this order, each once. Other loaded clients are dropped."""
        for client in self._futures.keys() - set(clients):
            self._futures.pop(client).cancel()
        self._queue, self._max_loaded = deque(i for i in clients if i not in self._futures), max_loaded
        self._submit()

    def take(self, client: int) -> T:
        """Return the loaded data of a client. Raises the error of its load."""
        future = self._futures.pop(client, None)
        if future is None and client in self._queue:
            self._queue.remove(client)
        self._submit()
        return self._load(client) if future is None else future.result()

    def _submit(self) -> None:
        while self._queue and len(self._futures) < self._max_loaded:
            client = self._queue.popleft()
            self._futures[client] = self._thread.submit(self._load, client)
