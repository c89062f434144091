"""Trials of whether a model's step can be captured as a CUDA graph. They use a copy before the run, because a capture
that
fails ends it."""

from __future__ import annotations

from collections.abc import Callable

from fastsam.fed.executors.cuda import Cuda
from fastsam.fed.executors.gradient_passes import Passes
from fastsam.fed.executors.recording import difference, python_state
from fastsam.fed.executors.task import Setup
from fastsam.fed.step.model_copy import Replica


def looks_at_values(setup: Setup, cuda: Cuda) -> str | None:
    """Why a step cannot be captured; None when it can, or where there is no example batch to try."""
    tried = _trial(setup)
    if tried is None:
        return None
    _, run = tried
    try:
        with cuda.no_wait():
            run()
    except RuntimeError as error:
        return f"the model or the loss looks at values on the host ({str(error).strip().splitlines()[0]})"
    return None


def changes_python(setup: Setup) -> str | None:
    """Return a description of the Python state of the model that a pass changes, buffers aside, or None. A captured
    step
    would freeze it."""
    tried = _trial(setup)
    if tried is None:
        return None
    replica, run = tried
    buffers = dict(replica.module.named_buffers())

    def state() -> dict[str, object]:
        return {name: value for name, value in python_state(replica.module).items() if name not in buffers}

    before = state()
    run()
    return difference(before, state())


def _trial(setup: Setup) -> tuple[Replica, Callable[[], object]] | None:
    """A copy of the model in training mode, and a pass of it on the example batch, after the first, in which libraries
    are set up."""
    if setup.example is None:
        return None
    x, y = setup.example
    replica = Replica.new(setup.model, setup.layout, setup.device)
    replica.module.train()
    passes = Passes(replica, setup.layout, setup.loss)
    passes.run(x, y)
    return replica, lambda: passes.run(x, y)
