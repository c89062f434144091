"""The callbacks and the progress of a run, called at its start, rounds, evaluations and end."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from importlib.util import find_spec
from types import TracebackType
from typing import Any

from torch import nn

from fastsam.extras import install_command
from fastsam.fed.callbacks.base import METHODS, CallbackError, RunView, Stop
from fastsam.fed.callbacks.terminal import RunProgress
from fastsam.fed.rundir.checkpoint import RunDirectory, RunState
from fastsam.fed.rundir.result import Result
from fastsam.fed.sums.ranks import Ranks

log = logging.getLogger("fastsam.fed")

Progress = Callable[[dict[str, Any]], None]


class CallbackHandler:
    """A context manager around the parts of a run. Every listener whose start was called gets the end, however the run
    ends. `stopped` is the reason of a callback to stop the run, or None; the same on all ranks."""

    def __init__(self, callbacks: Sequence[Any], progress: Progress | bool | None, label: str, rounds: int) -> None:
        self.callbacks, self.progress = _check_callbacks(callbacks), _progress(progress)
        self.stopped: str | None = None
        self._label, self._rounds = label, rounds
        self._ranks = Ranks()
        self._view: RunView | None = None
        self._active: list[Any] = []
        self._own_bar: RunProgress | None = None
        self._bar = ExitStack()

    def names(self) -> list[str]:
        """Return the classes of the callbacks, which all ranks must have in common."""
        return [type(one).__name__ for one in self.callbacks]

    def start(
        self,
        ranks: Ranks,
        state: RunState,
        directory: RunDirectory | None,
        config: Callable[[], Mapping[str, Any]],
        export: Callable[[RunState], nn.Module],
        identity: Callable[[], Mapping[str, Any]],
        has_value: Callable[[str, int], bool],
    ) -> None:
        """Begin the run at `state`; collective. `export` returns the model of a state, `identity` what must be the same
        when the run is resumed. `has_value`: see `Loop.has_value`."""
        self._ranks = ranks
        if ranks.first and self.progress is True:
            self.progress = self._own_bar = self._bar.enter_context(_bar(self._label, self._rounds))
        if self.callbacks and ranks.first:
            path = None if directory is None else directory.path
            self._view = RunView(config(), self._rounds, path, state, export, identity, has_value)
            for callback in self.callbacks:
                self._call(callback, "on_start")
                self._active.append(callback)
        self._share()

    def round(self, state: RunState, is_evaluated: bool) -> None:
        """Tell the listeners that the run has come to `state`, perhaps with an evaluation. Collective if there are
        callbacks."""
        if callable(self.progress) and self._ranks.first:
            self.progress(dict(state.history[-1]))
        if not self.callbacks:
            return
        if self._view is not None:
            self._view.advance(state)
            for method in ("on_evaluation", "on_round") if is_evaluated else ("on_round",):
                for callback in self.callbacks:
                    self._call(callback, method, dict(state.history[-1]))
        self._share()

    def end(self, result: Result) -> None:
        """End the run after everything is written. Raises CallbackError after all callbacks were called."""
        if self._own_bar is not None:
            self._own_bar.end(self.stopped, result.run_dir)
        if errors := self._finish(result):
            raise errors[0]

    def _finish(self, result: Result | None) -> list[CallbackError]:
        """Close the bar and call `on_end` of all callbacks. Return the errors that they raised."""
        self._bar.close()
        errors = []
        while self._active:
            try:
                self._call(self._active.pop(0), "on_end", result)
            except CallbackError as error:
                errors.append(error)
        return errors

    def _call(self, callback: Any, method: str, *arguments: Any) -> None:
        """Call a method if the callback has it. Raises CallbackError for any error that it raises, except for
        Ctrl-C."""
        view = self._view
        assert view is not None
        try:
            if hasattr(callback, method):
                getattr(callback, method)(view, *arguments)
        except Stop as stop:
            if self.stopped is None and method != "on_end":
                self.stopped = view.stopped = str(stop) or f"{type(callback).__name__} stopped the run"
        except Exception as error:
            place = (
                f"in round {view.round}" if method in ("on_round", "on_evaluation") else f"after {view.round} rounds"
            )
            raise CallbackError(
                f"{type(callback).__name__}.{method} failed {place}: {type(error).__name__}: {error}"
            ) from error

    def _share(self) -> None:
        if self.callbacks:
            self.stopped = self._ranks.broadcast(self.stopped)

    def __enter__(self) -> CallbackHandler:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:  # `end` is yet to come
            return
        if self._view is not None:
            self._view.error = error
        for problem in self._finish(None):  # must not hide why the run ended
            log.error("%s", problem)


def _check_callbacks(callbacks: Any) -> Sequence[Any]:
    """Return the callbacks. Raises ValueError unless it is a list of objects with a callback's methods."""
    if callbacks is None:
        return ()
    names = ", ".join(METHODS)
    if not isinstance(callbacks, (list, tuple)):
        raise ValueError(f"callbacks must be a list of objects with one of {names}, got {type(callbacks).__name__}")
    for one in callbacks:
        if isinstance(one, type):
            raise ValueError(f"callbacks must hold instances: write {one.__name__}(...), not {one.__name__}")
        if not any(callable(getattr(one, method, None)) for method in METHODS):
            raise ValueError(f"callbacks must hold objects with one of {names}, such as a fed.Callback; got {one!r}")
    return tuple(callbacks)


def _progress(progress: Any) -> Progress | bool:
    """Raise ValueError unless it is a function, a bool or None."""
    if progress is None:
        return sys.stderr is not None and sys.stderr.isatty() and find_spec("rich") is not None
    if progress is True and find_spec("rich") is None:
        raise ImportError(f"progress=True draws its bar with rich, which is not installed: {install_command('lab')}")
    if not isinstance(progress, bool) and not callable(progress):
        raise ValueError(
            f"progress must be a function of a round's record, True or False (a bar or none; by default where there is "
            f"a terminal), got {progress!r}"
        )
    return progress


def _bar(label: str, rounds: int) -> RunProgress:
    from rich.console import Console

    return RunProgress(Console(stderr=True), label, rounds)
