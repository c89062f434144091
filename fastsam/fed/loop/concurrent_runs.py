"""Several `fed.run` in threads of one process: they share torch's default generators, so none of them may draw.

`fed.run` enters `registered` before its trial pass and says after it whether the run draws.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

_lock = threading.Lock()  # guards the table
trials = threading.Lock()  # trial passes seed and read the default generators: one at a time
_runs: dict[int, tuple[int, bool]] = {}  # by identity of a run: its thread, and whether it draws random numbers


@contextmanager
def registered() -> Iterator[Registration]:
    """Register a run of this thread until the end. Raises ValueError if another thread has a run that draws."""
    registration = Registration()
    registration.update(False)
    try:
        yield registration
    finally:
        with _lock:
            del _runs[id(registration)]


class Registration:
    """A run's place in the table of the process."""

    def update(self, draws: bool) -> None:
        """Record whether the run draws random numbers. Raises ValueError if this run or another run draws, in two
        threads."""
        thread = threading.get_ident()
        with _lock:
            others = [other for own, other in _runs.items() if own != id(self) and other[0] != thread]
            if others and (draws or any(other_draws for _, other_draws in others)):
                raise ValueError(
                    "another fed.run is active in a thread of this process, and one of the two draws random numbers "
                    "(dropout?) from torch's default generator, which both share. Run them one after the other, or in "
                    "processes"
                )
            _runs[id(self)] = thread, draws
