"""What a callback is: methods that a run calls, and what they are given."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from fastsam.fed.rundir.checkpoint import RunState
from fastsam.fed.rundir.result import Result

Record = dict[str, Any]
METHODS = ("on_start", "on_evaluation", "on_round", "on_end")


class Stop(Exception):
    """Raised by a callback's `on_start`, `on_evaluation` or `on_round`: the run ends here as if all its rounds were
    over, with a `Result`.

    The other callbacks still hear of the round. The text is `stopped` in the summary.
    """


class CallbackError(RuntimeError):
    """A callback raised: the message names it, the cause is attached. The run directory holds the last completed
    round."""


class RunView:
    """What a callback sees of a run. Nothing in it is the run's own: whatever is written into it changes no weight and
    no record.

    config: what was asked for, as JSON has it. rounds: how many the run shall have. run_dir: where it is written, or
    None. stopped: why it was stopped, None where it was not. error: what ended it, in `on_end` alone; None where it
    ended well. keys: names of the numbers that a record may have; None if measures of your own add to them.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        rounds: int,
        run_dir: Path | None,
        state: RunState,
        export: Callable[[RunState], nn.Module],
        keys: Sequence[str] | None = None,
    ) -> None:
        self.keys = keys
        self.config, self.rounds, self.run_dir = dict(config), rounds, run_dir
        self.stopped: str | None = None
        self.error: BaseException | None = None
        self._state, self._export = state, export

    @property
    def round(self) -> int:
        """Completed rounds, those before a resume included."""
        return self._state.round

    @property
    def history(self) -> list[Record]:
        """The records of the completed rounds, copied."""
        return [dict(record) for record in self._state.history[: self.round]]

    def model(self) -> nn.Module:
        """A copy of the user's model with the global weights after `round` rounds."""
        return self._export(self._state)

    def advance(self, state: RunState) -> None:
        """The run has come to this state."""
        self._state = state


class Callback:
    """Listens to a run: override what is needed. An object of any class serves that has one of these methods.

    The methods of several callbacks are called in the order of the list. Of several ranks the first one calls them, and
    no other. They cannot change the weights: `run.model()` is a copy, and so is a record.
    """

    def on_start(self, run: RunView) -> None:
        """Before the first round of this call. In a run that is resumed `run.history` has the rounds before: what is
        counted begins with them."""

    def on_evaluation(self, run: RunView, record: Record) -> None:
        """After a round in which the global model was evaluated, before its `on_round`. record: the round's, as in
        metrics.jsonl."""

    def on_round(self, run: RunView, record: Record) -> None:
        """After every round, when its record has been written."""

    def on_end(self, run: RunView, result: Result | None) -> None:
        """When the run directory is complete. Called after an error too (Ctrl-C, say): then `result` is None, and
        `run.error` says what it was."""
