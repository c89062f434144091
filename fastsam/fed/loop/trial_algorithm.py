"""The trial of an algorithm before round 1: its constants, its own model and its loop, for a first client."""

from __future__ import annotations

from torch import Tensor

from fastsam.fed.algorithms.base import LocalUpdate, Round, State
from fastsam.fed.clients.plan import plan
from fastsam.fed.executors import ClientError, Setup, Task
from fastsam.fed.executors.client import Client
from fastsam.fed.executors.client_trainer import ClientTrainer
from fastsam.fed.loop.client_state import StateRows
from fastsam.fed.loop.contract import Contract
from fastsam.fed.loop.first_round import check_padding
from fastsam.fed.loop.trial_pass import restore_random_state
from fastsam.fed.rundir.checkpoint import RunState
from fastsam.fed.update.local_update import ClientUpdate


def try_algorithm(contract: Contract, setup: Setup, old_state: RunState, round: Round) -> tuple[LocalUpdate, bool]:
    """Call the algorithm for a first client, so that its errors come before anything is written.

    Return the client's constants, and whether the algorithm has a loop with phases, or with further models. Raises
    ValueError if a method returns a wrong value, or if the model, the loss or the loop fails.
    """
    server = old_state.server
    state = contract.init_client(server)
    update, row = contract.local_updates(server, StateRows.of([state]).rows, 1, round)[0]
    if getattr(contract.algorithm, "own_models", False):
        _check_own_model(contract.call("own_model", (server, state)), server["w"])
    vectors = {name: getattr(update, name) for name in update.constants.vectors}
    check_padding(vectors, round.layout, "the LocalUpdate of local_update")
    if not contract.has_loop:
        return update, False
    return update, _try_loop(contract, setup, old_state, state, (update, row), round)


def _check_own_model(vector: object, w: Tensor) -> None:
    if not isinstance(vector, Tensor) or (vector.shape, vector.dtype, vector.device) != (w.shape, w.dtype, w.device):
        kind = (
            f"{vector.dtype} {list(vector.shape)} on {vector.device}"
            if isinstance(vector, Tensor)
            else type(vector).__name__
        )
        raise ValueError(
            f"own_model must return the weights of one client, {w.dtype} {list(w.shape)} on {w.device}; the state "
            f"that it gets has no dimension for rows. Got {kind}"
        )


def _try_loop(
    contract: Contract, setup: Setup, old_state: RunState, state: State, constants: ClientUpdate, round: Round
) -> bool:
    """Run the loop of the client with most samples on a copy of the model, with one batch in each of its passes over
    the data. Return True if the loop has phases, or further models."""
    client = setup.population.largest_client()
    with restore_random_state(setup.device):
        trainer = ClientTrainer(setup)
        try:
            (work,) = plan(setup.population, setup.options, round.index, [client], at_once=1)
            task = Task(client, work, setup, round.index, round.lr, *constants)
            trainer.open(task, old_state.server["w"], old_state.buffers)
            handle = Client(trainer, limit=1)
            handle.results(contract.train_client(old_state.server, state, round, handle, is_trial=True))
        except ClientError as error:
            cause = error.__cause__ or error
            kind = "" if type(cause) is ValueError else f"{type(cause).__name__}: "
            name = type(contract.algorithm).__name__
            raise ValueError(f"a trial of {name}.train_client on client {client} failed: {kind}{cause}") from error
    return handle.has_phases
