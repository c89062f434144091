"""The trial of a captured step: a pass on the example batch shows, before any capture, what a capture would not serve.

A capture that fails ends the run. A capture of a pass that depends on more than tensors would be frozen without an
error.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from traceback import FrameSummary, extract_tb, walk_stack
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
        passes.run(x, y)
        for problem in (_waits, _draws_on_host, _changes_python):
            reason = problem(lambda: passes.run(x, y), replica.module, cuda)
            if reason is not None:
                return reason
    return None


def _why_no_draws(model: nn.Module, cuda: Cuda) -> str | None:
    """Return the reason why a captured step of a model cannot draw random numbers, or None."""
    if any(isinstance(m, nn.RNNBase) and m.dropout > 0 and m.num_layers > 1 for m in model.modules()):
        return "the model has dropout between recurrent layers, for which cuDNN keeps random numbers of its own"
    if not cuda.repeats_draws():
        return f"captured steps of torch {torch.__version__} do not draw random numbers at an offset"
    return None


def _waits(run: Callable[[], object], model: nn.Module, cuda: Cuda) -> str | None:
    try:
        with cuda.no_wait():
            run()
    except RuntimeError as error:
        line, message = _user_line(extract_tb(error.__traceback__)), str(error).strip().splitlines()
        return f"the model or the loss looks at values on the host{line} ({message[0] if message else ''})"
    return None


def _draws_on_host(run: Callable[[], object], model: nn.Module, cuda: Cuda) -> str | None:
    recorder = HostDrawRecorder(cuda.host_generator())
    with recorder:
        run()
    if recorder.has_drawn():
        return f"a pass draws random numbers on the CPU{recorder.line}, which a capture would freeze"
    return None


def _changes_python(run: Callable[[], object], model: nn.Module, cuda: Cuda) -> str | None:
    old_state = python_state(model)
    run()
    changes = difference(old_state, python_state(model))
    return f"a pass changes Python's state ({changes}), which a capture would freeze" if changes else None


class HostDrawRecorder(TorchFunctionMode):
    """Records the first line of a user's code inside that draws from a generator of the host.

    Attributes:
        line: place of the line in words, "" if it is unknown.
    """

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self._generator, self._state, self.line = generator, generator.get_state(), ""

    def has_drawn(self) -> bool:
        """Return True if the state of the generator has changed."""
        return not torch.equal(self._generator.get_state(), self._state)

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if not self.line and self.has_drawn():
            frames = [FrameSummary(frame.f_code.co_filename, line, "") for frame, line in walk_stack(sys._getframe())]
            own = next(i for i, frame in enumerate(frames[1:], 1) if frame.filename == __file__)
            self.line = _user_line(reversed(frames[:own]))
        return result


def _user_line(frames: Iterable[FrameSummary]) -> str:
    """Return the last line outside of torch and fastsam of frames, in words."""
    lines = [frame for frame in frames if not frame.filename.startswith(_PACKAGES)]
    return f" in {Path(lines[-1].filename).name}, line {lines[-1].lineno}" if lines else ""
