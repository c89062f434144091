"""The calls of an algorithm's methods in a run: `Contract` for the algorithms of fastsam, `CheckedContract` for all
others.

Tests run the algorithms of fastsam through both (tests/fed/loop/test_algorithm_calls.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from fastsam.fed.algorithms.base import Aggregate, Algorithm, Round, State, Upload, has_loop
from fastsam.fed.executors.client import Client
from fastsam.fed.loop import row_contract
from fastsam.fed.loop.client_state import rows
from fastsam.fed.loop.contract import (
    MutationCheck,
    call_algorithm,
    check_client,
    check_extra,
    check_finished,
    check_initial_state,
    check_server,
    check_updates,
)
from fastsam.fed.loop.padding import check_padding
from fastsam.fed.step.local_update import ClientResults, LocalUpdate

Constants = tuple[LocalUpdate, int]  # a client's local update, and the client's row in its vectors


class Contract:
    """Calls of the methods of an algorithm. Exceptions become AlgorithmErrors; returned values are used as they are."""

    def __init__(self, algorithm: Algorithm) -> None:
        self.algorithm = algorithm
        self.sends_weights = bool(getattr(algorithm, "sends_weights", False))
        self.has_loop = has_loop(algorithm)

    def init_server(self, w0: Tensor) -> State:
        """Return the server's state before the first round."""
        state: State = call_algorithm(self.algorithm, "init_server", (w0,), None)
        return state

    def init_client(self, server: State, round: Round | None = None, client_ids: Sequence[int] = ()) -> State:
        """Return the state of new clients, which they share. `round` is None before the first round."""
        state: State = call_algorithm(
            self.algorithm, "init_client", (server,), None if round is None else round.index, client_ids
        )
        return state

    def local_updates(
        self, server: State, client: State, n: int, round: Round, client_ids: Sequence[int] = ()
    ) -> list[Constants]:
        """Return the constants of n clients with the states `client`, `[n, ...]`. Without `client_ids` this is the
        trial before the first round."""
        index = round.index if client_ids else None
        made = call_algorithm(self.algorithm, "local_update", (server, client, round), index, client_ids)
        return [(made, row) for row in range(n)] if isinstance(made, LocalUpdate) else [(one, 0) for one in made]

    def train_client(self, server: State, state: State, round: Round, client: Client) -> Mapping[str, Tensor] | None:
        """Do the local work of a client in the loop of the algorithm, and return its extra results."""
        arguments = (client, server, state, round)
        extra: Mapping[str, Tensor] | None = call_algorithm(
            self.algorithm, "train_client", arguments, round.index, [client.id]
        )
        return extra

    def finish_clients(
        self, server: State, states: Sequence[State], client: State, results: ClientResults, round: Round
    ) -> tuple[State, Upload]:
        """Return the new states of n clients, `[n, ...]`, and their upload. `client` holds `states` as rows."""
        finished: tuple[State, Upload] = call_algorithm(
            self.algorithm, "finish_client", (server, client, results, round), round.index, results.client_ids
        )
        return finished

    def step_server(self, server: State, aggregate: Aggregate, round: Round) -> State:
        """Return the server's state after the round."""
        state: State = call_algorithm(self.algorithm, "step_server", (server, aggregate, round), round.index)
        return state


class CheckedContract(Contract):
    """Calls of the methods of a user's algorithm: every returned value is checked, and arguments are guarded against
    writes.

    In the first round the rows of several clients are compared with the rows of single clients. The padding of rows is
    checked then, and a warning names attributes that the round has changed.
    """

    def __init__(self, algorithm: Algorithm) -> None:
        super().__init__(algorithm)
        self._index = -1  # index of the present round
        self._guard = MutationCheck()
        self._copy: Any = None  # a copy of the algorithm, in the first round until rows have been compared
        self._attributes: dict[str, object] = {}
        self._new_clients = 0
        self._has_seen_upload = True

    def init_server(self, w0: Tensor) -> State:
        """Return the server's state before the first round. Raises ValueError if it is not a dict of tensors with
        "w"."""
        return check_server(super().init_server(w0), w0, "init_server")

    def init_client(self, server: State, round: Round | None = None, client_ids: Sequence[int] = ()) -> State:
        """Return the state of new clients. Raises ValueError if it is not a dict of tensors, or has NaN before the
        first
        round."""
        if round is not None:
            self._begin_round(server, round)
        state = check_client(super().init_client(server, round, client_ids), "init_client")
        if round is None:
            return check_initial_state(state, "init_client")
        self._guard.lend("client", state)
        self._new_clients = len(client_ids)
        return state

    def local_updates(
        self, server: State, client: State, n: int, round: Round, client_ids: Sequence[int] = ()
    ) -> list[Constants]:
        """Return the constants of n clients. Raises ValueError unless there is one LocalUpdate, or n of them."""
        index = round.index if client_ids else None
        if client_ids:
            self._begin_round(server, round)
        made = call_algorithm(self.algorithm, "local_update", (server, client, round), index, client_ids)
        checked = check_updates(made, server["w"], n)
        if self._new_clients > 1 and self._copy is not None:
            self._new_clients = 0
            row_contract.check_local_update(self._copy, server, {name: x[0] for name, x in client.items()}, round)
        return checked

    def train_client(self, server: State, state: State, round: Round, client: Client) -> Mapping[str, Tensor] | None:
        """Do the local work of a client. Raises ValueError unless the loop returns a dict of tensors, or None."""
        return check_extra(super().train_client(server, state, round, client))

    def finish_clients(
        self, server: State, states: Sequence[State], client: State, results: ClientResults, round: Round
    ) -> tuple[State, Upload]:
        """Return new states and the upload of n clients. Raises ValueError for other values, and for a write into the
        old states."""
        self._begin_round(server, round)
        guard, alone = MutationCheck(), []
        guard.lend("client", client)
        if len(states) > 1 and self._copy is not None:  # copies, because results may be written into
            some = enumerate(states[: row_contract.COMPARED])
            alone = [(server, rows([state]), results.take([i]), round) for i, state in some]
        finished = super().finish_clients(server, states, dict(client), results, round)
        guard.check()
        state, upload = check_finished(finished, server, len(states))
        if alone:
            row_contract.check_rows(self._copy, "finish_client", finished, alone, len(states))
            self._copy = None
        if not self._has_seen_upload:
            self._has_seen_upload = True
            check_padding({**upload.mean, **upload.sum}, round.layout, "the Upload of finish_client")
        return state, upload

    def step_server(self, server: State, aggregate: Aggregate, round: Round) -> State:
        """Return the server's state after the round. Raises ValueError if it is not a dict of tensors with "w", or if a
        method has written into a state in this round."""
        self._begin_round(server, round)
        after = check_server(super().step_server(server, aggregate, round), server["w"], "step_server")
        if round.index == 0:
            check_padding({"w": after["w"]}, round.layout, "the state that step_server returns")
            row_contract.warn_changed(self.algorithm, self._attributes)
        self._guard.check()
        return after

    def _begin_round(self, server: State, round: Round) -> None:
        """Begin to guard the server's state, at the first call of a round."""
        if self._index == round.index:
            return
        self._index, self._guard, self._new_clients = round.index, MutationCheck(), 0
        self._guard.lend("server", server)
        first = round.index == 0
        self._copy = row_contract.copied(self.algorithm) if first else None
        self._attributes = row_contract.attributes(self.algorithm) if first else {}
        self._has_seen_upload = not first


def contract_of(algorithm: Algorithm) -> Contract:
    """Return the contract of an algorithm: checked unless its class, and the class that it wraps, are of fastsam."""
    return CheckedContract(algorithm) if row_contract.is_own(algorithm) else Contract(algorithm)
