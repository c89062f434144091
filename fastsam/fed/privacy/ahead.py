"""What the end of a round asks for and nothing in the round changes, made before it is asked for."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Generic, TypeVar

Made = TypeVar("Made")
AT_ONCE = 16  # rounds


class Ahead(Generic[Made]):
    """make: from a round's number; what it raises is raised where its result is asked for.

    small: made in no time, so it is made for several rounds at once, because what is in no cache takes three times as long; else for one round,
    in a thread while its clients train (to wake a thread takes as long as some thousand random numbers).
    """

    def __init__(self, make: Callable[[int], Made], small: bool) -> None:
        self._make = make
        # Which ends with this object.
        self._thread = None if small else ThreadPoolExecutor(1, "fastsam works ahead")
        self._made: dict[int, Callable[[], Made]] = {}

    def begin(self, index: int) -> None:
        """Before the clients of a round train."""
        if index in self._made:
            return
        if self._thread is None:
            self._made = {t: partial(_given, self._make(t)) for t in range(index, index + AT_ONCE)}
        else:
            future: Future[Made] = self._thread.submit(self._make, index)
            self._made = {index: future.result}

    def of(self, index: int) -> Made:
        """Of round `index`, begun or not."""
        self.begin(index)
        return self._made[index]()


def _given(value: Made) -> Made:
    return value
