"""What the end of a round asks for and nothing in the round changes, made before it is asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

import torch

Made = TypeVar("Made")


class Ahead(Generic[Made]):
    """make: for some rounds, from their numbers, in a thread while clients train; what it raises is raised where a
    result is asked for.

    at_once: rounds that are made together, the first of which is a multiple of it: to wake a thread takes as long as
    some thousand random numbers.
    """

    def __init__(self, make: Callable[[range], Sequence[Made]], at_once: int) -> None:
        self._make, self._at_once = make, at_once
        # Which ends with this object, and leaves the other processors to the clients.
        self._thread = ThreadPoolExecutor(1, "fastsam works ahead", torch.set_num_threads, (1,))
        self._made: dict[int, Future[Sequence[Made]]] = {}

    def begin(self, index: int) -> None:
        """Before the clients of a round train."""
        block, later = index // self._at_once, (index + self._at_once - 1) // self._at_once
        if block not in self._made or later not in self._made:
            self._made = {b: self._made.get(b) or self._submit(b) for b in dict.fromkeys((block, later))}

    def of(self, index: int) -> Made:
        """Of round `index`, begun or not."""
        block, place = divmod(index, self._at_once)
        if block not in self._made:
            self.begin(index)
        return self._made[block].result()[place]

    def _submit(self, block: int) -> Future[Sequence[Made]]:
        first = block * self._at_once
        return self._thread.submit(self._make, range(first, first + self._at_once))
