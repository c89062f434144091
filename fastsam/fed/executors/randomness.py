"""A model's random numbers in training (dropout) as a function of (seed, round, client, step), equal in both passes of
a step.

On the CPU a pass draws from a generator with the seed of client and step. On a CUDA device it draws from the sequence
of the client's seed, step k at the offset `k * PASS_OFFSET`: a captured step can count offsets, but has one seed.

torch has one default generator for all threads, and functions that draw from it (dropout) seldom take another one.
Therefore the trial step records which functions of torch draw. In a thread, each of them gets the thread's numbers in
the default generator while it runs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fastsam.fed.executors.base import ClientError
from fastsam.fed.executors.cuda import PASS_OFFSET, Cuda
from fastsam.fed.executors.task import Task

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
        state = torch.get_rng_state()
        return state if self._device.type != "cuda" else torch.cat([state, torch.cuda.get_rng_state(self._device)])

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        old_state = self._state()
        result = func(*args, **(kwargs or {}))
        new_state = self._state()
        if not torch.equal(old_state, new_state):
            self._hidden |= not torch.equal(old_state, self._last)
            self._calls.add(func)
            self._last = new_state
        return result

    def random_ops(self) -> RandomOps | None:
        """Return the functions that drew in the pass, at its end, with the backward half. None: nothing drew. Empty:
        something else than these calls drew too."""
        current_state = self._state()
        if torch.equal(current_state, self._begin):
            return None
        return frozenset() if self._hidden or not torch.equal(current_state, self._last) else frozenset(self._calls)


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


def device_generator(device: torch.device) -> torch.Generator | None:
    """Return the default generator of a CUDA device, or None on the CPU."""
    return Cuda(device).generator() if device.type == "cuda" else None


class PassRandomness:
    """torch's default generators, seeded before every pass of a model that draws from them.

    A model that draws is recognised by the state of the generators, so no list of module types is needed, and
    functional dropout counts. Seeding costs microseconds in each pass, so a model that has never drawn is not seeded.
    The first client found to have drawn is trained again, so that its numbers do not depend on when this was found.

    Args:
        device: device of training.
        draws: the model is known to draw.
    """

    def __init__(self, device: torch.device, draws: bool = False) -> None:
        self.of_device = device_generator(device)
        self.generators = [torch.default_generator, *[g for g in [self.of_device] if g is not None]]
        self.draws = draws
        self._begin: list[torch.Tensor] = []

    def generator_context(self) -> AbstractContextManager[object]:
        """Return the context in which a client trains. The model draws from `generators` in it."""
        return nullcontext()

    @contextmanager
    def preserve_states(self) -> Iterator[None]:
        """Restore the user's generator states at the end of a round."""
        states = self._begin = self._states()
        try:
            yield
        finally:
            for generator, state in zip(self.generators, states, strict=True):
                generator.set_state(state)

    def check(self, client: int) -> None:
        """Raise ClientError for random numbers that a model must not draw, when `client` is done."""

    def begin(self, task: Task) -> None:
        """Begin a client, whose passes before the first step draw what follows the seed of the first step."""
        self.seed_pass(task, 0)
        if not self.draws:
            self._begin = self._states()

    def seed_pass(self, task: Task, k: int) -> None:
        """Set the numbers that a pass of step k draws."""
        self.generators[0].manual_seed(task.pass_seed(k))
        if self.of_device is not None:
            self.of_device.manual_seed(task.work.seed).set_offset(k * PASS_OFFSET)

    def has_drawn(self) -> bool:
        """Return True once, at the end of the first client that drew."""
        if self.draws or all(map(torch.equal, self._states(), self._begin)):
            return False
        self.draws = True
        return True

    def _states(self) -> list[torch.Tensor]:
        return [generator.get_state() for generator in self.generators]


class NoRandomness(PassRandomness):
    """No seeding, for clients that train at the same time: a model that draws is an error."""

    REASON = (
        "a training pass of the model draws random numbers (dropout?) from torch's default generator, which is one "
        "for all clients that train at the same time: what is drawn would depend on who comes first"
    )

    def begin(self, task: Task) -> None:
        """Begin a client without a seed."""

    def check(self, client: int) -> None:
        """See `PassRandomness.check`. Nothing may have drawn since the start of the round."""
        with default_generator:
            is_unchanged = all(map(torch.equal, self._states(), self._begin))
        if not is_unchanged:
            raise ClientError(f"when client {client} was done: {self.REASON}. Use executor='sequential'")


class OwnRandomness(PassRandomness):
    """A thread's generator, from which a model that is known to draw by these calls gets what it would have got from
    the default one."""

    def __init__(self, calls: RandomOps) -> None:
        self.generators, self.of_device, self.draws = [torch.Generator()], None, True
        self._override = GeneratorOverride(calls, self.generators[0])

    def generator_context(self) -> AbstractContextManager[object]:
        return self._override


class LaneRandomness(PassRandomness):
    """A lane whose steps are captured, for a model that is known to draw: the numbers of `PassRandomness`.

    The lane has a state of the device's generator, from which its replays draw.

    Args:
        device: device of training.
        cuda: its streams and generators.
    """

    def __init__(self, device: torch.device, cuda: Cuda) -> None:
        super().__init__(device, draws=True)
        self.cuda, self.state, self._first = cuda, cuda.generator().clone_state(), 0

    def begin_replay(self, task: Task, k: int) -> None:
        """Set the numbers of a replay, or of a capture, whose first step is k."""
        self._first = k
        self.state.manual_seed(task.work.seed).set_offset(k * PASS_OFFSET)

    def seed_pass(self, task: Task, k: int) -> None:
        """See `PassRandomness.seed_pass`. A captured pass counts from the first step of the replay."""
        if self.cuda.is_capturing():
            self.cuda.set_captured_offset(task.work.seed, (k - self._first) * PASS_OFFSET)
        else:
            super().seed_pass(task, k)
