"""Models that draw random numbers while clients train at the same time on a CPU. Each thread has its own numbers.

torch has one default generator for all threads, and functions that draw from it (dropout) seldom take another one.
Therefore the trial step records which functions of torch draw. In a thread, each of them gets the thread's numbers in
the default generator while it runs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

RandomOps = frozenset[Callable[..., Any]]

# Held while a thread's numbers are in the default generator, and while it is read.
default_generator = threading.Lock()


class RandomOpRecorder(TorchFunctionMode):
    """Records which of the calls inside draw from the default generators, on the device of a model's inputs and on the
    CPU."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self._begin = self._last = self._state()  # after the last call that drew
        self._calls: set[Callable[..., Any]] = set()
        self._hidden = False

    def _state(self) -> Tensor:
        own = torch.get_rng_state()
        return own if self._device.type != "cuda" else torch.cat([own, torch.cuda.get_rng_state(self._device)])

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        before = self._state()
        made = func(*args, **(kwargs or {}))
        after = self._state()
        if not torch.equal(before, after):
            self._hidden |= not torch.equal(before, self._last)
            self._calls.add(func)
            self._last = after
        return made

    def found(self) -> RandomOps | None:
        """At the end of the pass, backward and all. None: nothing drew. Empty: something else than these calls drew
        too."""
        now = self._state()
        if torch.equal(now, self._begin):
            return None
        return frozenset() if self._hidden or not torch.equal(now, self._last) else frozenset(self._calls)


class GeneratorOverride(TorchFunctionMode):
    """While it is entered, `calls` of this thread draw from `generator`."""

    def __init__(self, calls: RandomOps, generator: torch.Generator) -> None:
        super().__init__()
        self._calls, self._generator = calls, generator

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func not in self._calls:
            return func(*args, **(kwargs or {}))
        with default_generator:
            state: Tensor = torch.get_rng_state()
            torch.set_rng_state(self._generator.get_state())
            try:
                return func(*args, **(kwargs or {}))
            finally:
                self._generator.set_state(torch.get_rng_state())
                torch.set_rng_state(state)
