"""The trial of a captured step: a pass on the example batch shows, before any capture, what a capture would not serve.

A capture that fails ends the run. A capture of a pass that depends on more than tensors would be frozen without an
error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from traceback import extract_tb
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from fastsam.fed.executors.cuda import Cuda, NumbersOnDevice
from fastsam.fed.executors.gradient_passes import ModelPasses
from fastsam.fed.executors.python_state import difference, python_state
from fastsam.fed.executors.randomness import PassRandomness
from fastsam.fed.executors.task import Setup
from fastsam.fed.update.model_copy import Replica

_PACKAGES = str(Path(str(torch.__file__)).parent), str(Path(__file__).parents[2])  # torch and fastsam


def why_not_captured(setup: Setup, cuda: Cuda) -> str | None:
    """Return the reason why a step cannot be captured, with the line of the model or the loss, or None. Without an
    example batch the passes are not tried."""
    if setup.draws is not None and (reason := _why_no_draws(setup.model, cuda)) is not None:
        return reason
    if setup.example is None:
        return None
    # A copy, because a capture that fails ends the run. In the first pass libraries are set up.
    x, y = setup.example
    replica = Replica.new(setup.model, setup.layout, setup.device)
    replica.module.train()
    passes = ModelPasses(replica, setup.layout, setup.loss)
    with PassRandomness(setup.device).preserve_states(), NumbersOnDevice():
        run = partial(passes.run, x, y)
        run()
        return _waits(run, cuda) or _draws_on_host(run, cuda) or _changes_python(run, replica.module)


def _why_no_draws(model: nn.Module, cuda: Cuda) -> str | None:
    """Return the reason why a captured step of a model cannot draw random numbers, or None."""
    if any(isinstance(m, nn.RNNBase) and m.dropout > 0 and m.num_layers > 1 for m in model.modules()):
        return "the model has dropout between recurrent layers, for which cuDNN keeps random numbers of its own"
    if not cuda.repeats_draws():
        return f"captured steps of torch {torch.__version__} do not draw random numbers at an offset"
    return None


def _waits(run: Callable[[], object], cuda: Cuda) -> str | None:
    try:
        with cuda.no_wait():
            run()
    except RuntimeError as error:
        message = str(error).strip().splitlines()
        return f"the model or the loss looks at values on the host{_user_line(error)} ({message[0] if message else ''})"
    return None


def _draws_on_host(run: Callable[[], object], cuda: Cuda) -> str | None:
    mode, line = _NoDraws(cuda.host_generator()), ""
    try:
        with mode:
            run()
    except _DrawError as error:
        line = _user_line(error)
    return f"a pass draws random numbers on the CPU{line}, which a capture would freeze" if mode.has_drawn() else None


def _changes_python(run: Callable[[], object], model: nn.Module) -> str | None:
    old_state = python_state(model)
    run()
    changes = difference(old_state, python_state(model))
    return f"a pass changes Python's state ({changes}), which a capture would freeze" if changes else None


class _DrawError(RuntimeError):
    """A function of torch drew random numbers."""


class _NoDraws(TorchFunctionMode):
    """Raises _DrawError after the first function of torch that draws from a generator of the host."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self._generator, self._state = generator, generator.get_state()

    def has_drawn(self) -> bool:
        """Return True if the state of the generator has changed."""
        return not torch.equal(self._generator.get_state(), self._state)

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if self.has_drawn():
            raise _DrawError
        return result


def _user_line(error: Exception) -> str:
    """Return the last line outside of torch and fastsam in the trace of an error, in words."""
    lines = [frame for frame in extract_tb(error.__traceback__) if not frame.filename.startswith(_PACKAGES)]
    return f" in {Path(lines[-1].filename).name}, line {lines[-1].lineno}" if lines else ""
