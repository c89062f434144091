"""The state of the local optimizer, which stays with its client (`optimizer_state="keep"`)."""

from __future__ import annotations

from dataclasses import replace

from fastsam.fed.algorithms.base import Round, State
from fastsam.fed.stages.base import ClientUploads, Stage
from fastsam.fed.update.steps import Step

PREFIX = "optimizer "  # before the names of the fields in a client's state


class KeepOptimizerState(Stage):
    """Store the fields of the local optimizer in the clients' states, and give them to the next local step."""

    def process_step(self, step: Step, client: State) -> Step:
        """Return the step with the state of the optimizer. It is empty for clients without one."""
        return replace(
            step, state={name.removeprefix(PREFIX): x for name, x in client.items() if name.startswith(PREFIX)}
        )

    def process_uploads(self, uploads: ClientUploads, round: Round) -> None:
        """Replace the fields in the clients' states."""
        new_fields = uploads.results.optimizer_state or {}
        other = {name: x for name, x in uploads.state.items() if not name.startswith(PREFIX)}
        uploads.state = other | {PREFIX + name: x for name, x in new_fields.items()}
