"""The trial of an algorithm's own loop (`Algorithm.train_client`) before the first round. Its errors so come before
anything is written."""

from __future__ import annotations

from fastsam.fed.algorithms.base import Round, State
from fastsam.fed.executors import ClientError, Setup, Task
from fastsam.fed.executors.client import Client
from fastsam.fed.executors.client_trainer import ClientTrainer
from fastsam.fed.loop.algorithm_calls import Constants, Contract
from fastsam.fed.loop.contract import call_algorithm, check_extra
from fastsam.fed.loop.trial_pass import random_state_kept
from fastsam.fed.rundir.checkpoint import RunState


def try_loop(
    contract: Contract,
    setup: Setup,
    before: RunState,
    client_state: State,
    constants: Constants,
    round: Round,
) -> bool:
    """Run the loop of one client on a copy of the model, with one batch in each of its passes over the data.

    Args:
        contract: calls the algorithm.
        setup: the facts of the run. The trial trains the client with most samples.
        before: state before the first round.
        client_state: state of a new client.
        constants: its local update, and its row in it.
        round: the first round.

    Returns:
        True if the loop has phases, or further models.

    Raises:
        ValueError: the model, the loss or the loop failed.
    """
    sizes = setup.population.known_sizes
    client = max(sizes, key=lambda i: (sizes[i], -i)) if sizes else 0
    with random_state_kept(setup.device):
        row = ClientTrainer(setup)
        try:
            task = Task(client, setup, round.index, round.lr, *constants)
            row.open(task, before.server["w"], before.buffers)
            handle = Client(row, limit=1)
            arguments = (handle, before.server, client_state, round)
            handle.results(check_extra(call_algorithm(contract.algorithm, "train_client", arguments, None)))
        except ClientError as error:
            cause = error.__cause__ or error
            kind = "" if type(cause) is ValueError else f"{type(cause).__name__}: "
            name = type(contract.algorithm).__name__
            raise ValueError(f"a trial of {name}.train_client on client {client} failed: {kind}{cause}") from error
    return handle.has_phases
