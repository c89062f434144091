"""The trial of an algorithm before round 1: its step, its own model and its loop, for a first client."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from fastsam.fed.algorithms.base import Round, State, Step
from fastsam.fed.clients.plan import plan
from fastsam.fed.executors import ClientError, Setup, Task
from fastsam.fed.executors.client import Client
from fastsam.fed.executors.client_trainer import ClientTrainer
from fastsam.fed.loop.checked_contract import Versions, check_padding
from fastsam.fed.loop.client_state import StateRows
from fastsam.fed.loop.contract import AlgorithmError, Contract, check_initial_state
from fastsam.fed.loop.trial_pass import restore_random_state
from fastsam.fed.rundir.checkpoint import RunState
from fastsam.fed.update.gradients import Gradients
from fastsam.fed.update.passes import Objective
from fastsam.fed.update.rows import Rows
from fastsam.fed.update.tensor_checks import check_like, kind_of


class AlgorithmTrial(NamedTuple):
    """The findings of the trial.

    Attributes:
        step: local step of a first client.
        has_phases: the algorithm has a loop with phases, or with further models.
        vectors: number of vectors of the size of the weights that a client in training has, one gradient included, and
            without the server's.
    """

    step: Step
    has_phases: bool
    vectors: int


def try_algorithm(
    contract: Contract, setup: Setup, old_state: RunState, round: Round, check_step: Callable[[Step], None]
) -> AlgorithmTrial:
    """Call the algorithm for a first client, so that its errors come before anything is written.

    `check_step` checks that the run can have such a step, before it is tried. Raises ValueError if a method returns a
    wrong value, or if the model, the loss, the step or the loop fails.
    """
    server = old_state.server
    state = check_initial_state(contract.init_client(server), "init_client")
    step = contract.local_step(server, StateRows.of([state]).rows, 1, round)
    check_step(step)
    if getattr(contract.algorithm, "own_models", False):
        expected = f"own_model must return the weights of one client, without rows: {kind_of(server['w'])}"
        check_like(contract.call("own_model", (server, state)), server["w"], expected)
    check_padding(step.tensors, round.layout, f"the {type(step).__name__} of local_step")
    if contract.has_loop:
        return AlgorithmTrial(step, *_try_loop(contract, setup, old_state, state, step, round))
    of_server = sum(any(x is t for t in server.values()) for x in step.tensors.values())
    is_tried = contract.checks_steps or not step.key.is_native
    if is_tried or setup.rule is None or setup.writes_parameters or not setup.has_mean_loss:
        return AlgorithmTrial(step, False, _try_step(contract, setup, old_state, step, round) - of_server)
    rows = Rows(setup)
    passes = _NoPasses(rows)
    step.begin(rows, server["w"], round.lr, passes)
    step(rows, passes)
    return AlgorithmTrial(step, False, rows.vectors + 1 + passes.teachers - of_server)


class _NoPasses:
    """Passes of one client without a model, whose losses and gradients are zero (see `Passes`): they show the memory of
    a step."""

    def __init__(self, rows: Rows) -> None:
        self._rows, self.teachers = rows, 0

    def __call__(self, objective: Objective | None = None, *operands: Tensor) -> tuple[Tensor, Gradients]:
        layout = self._rows.layout
        gradients = Gradients(layout.views(self.all()), tuple(range(len(layout.segments))), layout.table)
        return self._rows.losses.new_zeros(1), gradients

    def first(self, batches: int) -> tuple[Tensor, Tensor]:
        return self.all(), self._rows.losses.new_zeros(1, 1)

    def all(self) -> Tensor:
        return torch.zeros_like(self._rows.z)

    def outputs_of(self, w: Tensor) -> Tensor:
        self.teachers = 1
        return w.new_zeros(1, 1)


def _try_step(contract: Contract, setup: Setup, old_state: RunState, step: Step, round: Round) -> int:
    """Take one step of the client with most samples on a copy of the model, and return the number of its vectors.

    Raises:
        ValueError: the step fails, or does not return a loss for each client, or has an output that does not exist.
    """
    algorithm = getattr(contract.algorithm, "inner", contract.algorithm)
    label = f"a trial of {type(step).__name__}, the step of {type(algorithm).__name__}.local_step,"
    versions = Versions({"server": old_state.server})
    with restore_random_state(setup.device):
        trainer = ClientTrainer(setup, limit=1)
        try:
            trainer.open(_task(setup, step, round), old_state.server["w"], old_state.buffers)
            batch = next(trainer.batches)
            losses: object = trainer.run_step(*batch)
        except ClientError as error:
            cause = error.__cause__ or error
            kind = "" if type(cause) is ValueError else f"{type(cause).__name__}: "
            raise ValueError(f"{label} failed: {kind}{cause}") from error
        except Exception as error:
            kind = "" if type(error) is ValueError else f"{type(error).__name__}: "
            raise AlgorithmError(f"{label} failed: {kind}{error}") from error
        if not isinstance(losses, Tensor) or losses.numel() != 1:
            raise AlgorithmError(f"{label} must return the losses of n clients, [n]: [1] here, got {kind_of(losses)}")
        try:
            trainer.results()
        except ValueError as error:
            raise AlgorithmError(f"{label} failed: {error}") from error
        versions.check(type(step).__name__)
        return trainer.vectors


def _task(setup: Setup, step: Step, round: Round) -> Task:
    """Return the task of the client with most samples."""
    client = setup.population.largest_client()
    (work,) = plan(setup.population, setup.options, round.index, [client], at_once=1)
    return Task(client, work, setup, round.index, round.lr, step)


def _try_loop(
    contract: Contract, setup: Setup, old_state: RunState, state: State, step: Step, round: Round
) -> tuple[bool, int]:
    """Run the loop of the client with most samples on a copy of the model, with one batch in each of its passes over
    the data. Return True if the loop has phases, or further models, and the number of its vectors."""
    client = setup.population.largest_client()
    with restore_random_state(setup.device):
        trainer = ClientTrainer(setup, limit=1)
        try:
            trainer.open(_task(setup, step, round), old_state.server["w"], old_state.buffers)
            handle = Client(trainer)
            handle.results(contract.train_client(old_state.server, state, round, handle, is_trial=True))
        except ClientError as error:
            cause = error.__cause__ or error
            kind = "" if type(cause) is ValueError else f"{type(cause).__name__}: "
            name = type(contract.algorithm).__name__
            raise ValueError(f"a trial of {name}.train_client on client {client} failed: {kind}{cause}") from error
    return handle.has_phases, trainer.vectors
