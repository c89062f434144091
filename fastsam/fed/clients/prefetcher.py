"""Clients that a thread loads while other clients train."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

T = TypeVar("T")

_PATIENCE = 0.1  # seconds of a wait between two looks for Ctrl-C


class Prefetcher(Generic[T]):
    """Loads the expected clients in a thread, one after the other. At most `most` loaded clients wait for their use.

    An error of a load is raised where the client is taken. The thread ends when it has nothing to do, and does not
    delay the exit of the process.
    """

    def __init__(self, load: Callable[[int], T]) -> None:
        self._load = load
        self._condition = threading.Condition()
        self._client_ids: set[int] = set()
        self._queue: deque[int] = deque()
        self._results: dict[int, tuple[T | None, BaseException | None]] = {}
        self._busy: int | None = None  # the client that the thread loads
        self._works, self._most = False, 0

    def prefetch(self, clients: Sequence[int], most: int) -> None:
        """Announce the clients that will be taken, in this order, each once. Other loaded clients are dropped, and at
        most `most` loaded clients wait."""
        with self._condition:
            self._client_ids, self._most = set(clients), most
            self._results = {i: one for i, one in self._results.items() if i in self._client_ids}
            self._queue = deque(i for i in clients if i not in self._results and i != self._busy)
            self._wake()

    def take(self, client: int) -> T:
        """Return the loaded data of a client. Raises the error of its load."""
        with self._condition:
            while self._busy == client:
                self._condition.wait(_PATIENCE)
            self._client_ids.discard(client)
            result = self._results.pop(client, None)
            if result is None and client in self._queue:
                self._queue.remove(client)
            self._wake()
        if result is None:
            return self._load(client)
        value, error = result
        if error is not None:
            raise error
        return value  # type: ignore[return-value]

    def _wake(self) -> None:
        if not self._works and self._queue and len(self._results) < self._most:
            self._works = True
            threading.Thread(target=self._work, name="fastsam loads clients", daemon=True).start()

    def _work(self) -> None:
        while True:
            with self._condition:
                if not self._queue or len(self._results) >= self._most:
                    self._works = False
                    return
                client = self._busy = self._queue.popleft()
            result: tuple[T | None, BaseException | None]
            try:
                result = self._load(client), None
            except BaseException as error:
                result = None, error
            with self._condition:
                if client in self._client_ids:
                    self._results[client] = result
                self._busy = None
                self._condition.notify_all()
            del result  # nothing of a client stays here while the next one is loaded
