"""The base class of callbacks, and the view of a run that callbacks get."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import nn

from fastsam.fed.rundir.checkpoint import RunState
from fastsam.fed.rundir.manifest import digest_of
from fastsam.fed.rundir.result import Result

Record = dict[str, Any]
METHODS = ("on_start", "on_evaluation", "on_round", "on_end")


class Stop(Exception):
    """Raised by a callback's `on_start`, `on_evaluation` or `on_round` to end the run with a `Result`, as after the
    last round.

    The other callbacks still get the round. The text is `stopped` in the summary.
    """


class CallbackError(RuntimeError):
    """A callback raised: the message names it, the cause is attached. The run directory holds the last completed
    round."""


class RunView:
    """A callback's view of a run. It has only copies, so writing into it changes no weight and no record.

    Attributes:
        config: the options of the run, as JSON.
        rounds: number of rounds that the run will have.
        run_dir: the run directory, or None.
        history: the records so far.
        stopped: the reason why the run was stopped, or None.
        error: the error that ended the run, only in `on_end`; None if it ended well.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        rounds: int,
        run_dir: Path | None,
        state: RunState,
        export: Callable[[RunState], nn.Module],
        identity: Callable[[], Mapping[str, Any]],
        has_value: Callable[[str, int], bool],
    ) -> None:
        self.config, self.rounds, self.run_dir = dict(config), rounds, run_dir
        self.stopped: str | None = None
        self.error: BaseException | None = None
        self._state, self._export, self._identity, self._has_value = state, export, identity, has_value

    @cached_property
    def fingerprint(self) -> str:
        """Hash of all that must be the same when the run is resumed: algorithm, options, model, data."""
        return digest_of(json.dumps(self._identity(), sort_keys=True).encode())

    @property
    def round(self) -> int:
        """The number of completed rounds, including rounds before a resume."""
        return self._state.round

    @property
    def history(self) -> list[Record]:
        """The records of the completed rounds, copied."""
        return [dict(record) for record in self._state.history[: self.round]]

    def model(self) -> nn.Module:
        """Return a copy of the user's model with the global weights after `round` rounds."""
        return self._export(self._state)

    def has_value(self, metric: str, num_rounds: int) -> bool:
        """Return False if a run that was never interrupted has no value of `metric` after `num_rounds` rounds. A run
        with fewer rounds, which was resumed, has evaluated its last one."""
        return self._has_value(metric, num_rounds)

    def advance(self, state: RunState) -> None:
        """Move the view to this state of the run."""
        self._state = state


class Callback:
    """The base class of callbacks: override what you need. An object of any class with one of these methods also works.

    The methods of several callbacks are called in the order of the list, on rank 0 only. They cannot change the
    weights, because `run.model()` and the records are copies.
    """

    def on_start(self, run: RunView) -> None:
        """Do something before the first round of this call. In a resumed run `run.history` has the earlier rounds, so
        counters can start from them."""

    def on_evaluation(self, run: RunView, record: Record) -> None:
        """Do something after a round in which the global model was evaluated, before its `on_round`. `record` is the
        round's record, as in metrics.jsonl."""

    def on_round(self, run: RunView, record: Record) -> None:
        """Do something after every round, when its record has been written."""

    def on_end(self, run: RunView, result: Result | None) -> None:
        """Do something when the run directory is complete. It is called after an error too (Ctrl-C, say); then `result`
        is None and `run.error` is the error."""
