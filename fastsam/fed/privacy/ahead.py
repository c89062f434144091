"""What the end of a round asks for and nothing in the round changes, made in a thread while its clients train."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

Made = TypeVar("Made")


class Ahead(Generic[Made]):
    """make: from a round's number; what it raises is raised where its result is asked for."""

    def __init__(self, make: Callable[[int], Made]) -> None:
        self._make = make
        self._thread = ThreadPoolExecutor(1, "fastsam works ahead")  # which ends with this object
        self._begun: tuple[int, Future[Made]] | None = None

    def begin(self, index: int) -> None:
        self._begun = index, self._thread.submit(self._make, index)

    def of(self, index: int) -> Made:
        """Of round `index`, begun or not; of the last one as often as it is asked."""
        if self._begun is None or self._begun[0] != index:
            self.begin(index)
        assert self._begun is not None
        return self._begun[1].result()
