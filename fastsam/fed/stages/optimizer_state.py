"""The state of the local optimizer, which stays with its client (`optimizer_state="keep"`)."""

from __future__ import annotations

from dataclasses import replace

from fastsam.fed.algorithms.base import Round, State
from fastsam.fed.stages.base import ClientUploads, Stage
from fastsam.fed.update.local_update import ClientUpdate

PREFIX = "optimizer "  # before the names of the fields in a client's state


class KeepOptimizerState(Stage):
    """Store the fields of the local optimizer in the clients' states, and give them to the next local update."""

    def process_updates(self, updates: list[ClientUpdate], client: State) -> list[ClientUpdate]:
        """Return the local updates with the state of the optimizer. It is empty for clients without one."""
        state = {name.removeprefix(PREFIX): x for name, x in client.items() if name.startswith(PREFIX)}
        first = updates[0][0]
        if all(update is first for update, _ in updates):
            update = replace(first, optimizer_state=state)
            return [(update, row) for _, row in updates]
        return [
            (replace(update, optimizer_state={name: x[i : i + 1] for name, x in state.items()}), row)
            for i, (update, row) in enumerate(updates)
        ]

    def process_uploads(self, uploads: ClientUploads, round: Round) -> None:
        """Replace the fields in the clients' states."""
        new_fields = uploads.results.optimizer_state or {}
        other = {name: x for name, x in uploads.state.items() if not name.startswith(PREFIX)}
        uploads.state = other | {PREFIX + name: x for name, x in new_fields.items()}
