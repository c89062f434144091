"""`fastsam.fed.run`: one call drives a federated experiment."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import cache, partial
from os import PathLike
from os.path import abspath
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from fastsam import backends
from fastsam.arena import Layout
from fastsam.fed import executors
from fastsam.fed.aggregation import Aggregation
from fastsam.fed.algorithms.base import Algorithm
from fastsam.fed.clients.all_clients import PairClients
from fastsam.fed.clients.batch_loss import BatchLoss
from fastsam.fed.clients.population import Loss, Population
from fastsam.fed.clients.prepare import prepare
from fastsam.fed.clients.samples import Collate
from fastsam.fed.clients.sampling import Available, Sampler, Weighting
from fastsam.fed.common.checks import choice, integer
from fastsam.fed.common.fingerprints import digest, hyperparameters
from fastsam.fed.common.option import suggest_option, table, with_help
from fastsam.fed.loop.assembly import assemble
from fastsam.fed.loop.cohort_size import warn_of_small_rounds
from fastsam.fed.loop.contract import check_algorithm
from fastsam.fed.loop.determinism import pick_device, register_run, repeatable, restore_autograd, trials
from fastsam.fed.loop.listeners import CallbackHandler, Progress
from fastsam.fed.loop.local_optimizer import Optimizer, with_own_optimizer
from fastsam.fed.loop.loop import Loop
from fastsam.fed.loop.options import Settings
from fastsam.fed.loop.personal import ClientModels, with_own_buffers
from fastsam.fed.loop.rates import Rate
from fastsam.fed.loop.resumption import identity_of, open_directory, settings_of
from fastsam.fed.loop.trial import check_buffers, try_model
from fastsam.fed.measures import Measures, NamedMeasures
from fastsam.fed.measures.hook import accuracy
from fastsam.fed.privacy.options import Privacy
from fastsam.fed.rundir.checkpoint import RunState
from fastsam.fed.rundir.result import Result
from fastsam.fed.stages.compression import TopK
from fastsam.fed.sums.ranks import join_ranks
from fastsam.fed.update.memory_format import keep_freed, reorder
from fastsam.fed.update.model_copy import check_model, export, trainable
from fastsam.fed.update.precision import float32_flags, with_precision

log = logging.getLogger("fastsam.fed")
NO_TEST_SET = (
    "there is no test set: the records' test_loss and test_accuracy are None. Pass test=(x, y). The summary's "
    "train_accuracy is of the clients' own training samples"
)


_IN_OBJECTS = {name: f"privacy=fed.Privacy({name}=...)" for name in table(Privacy)} | {
    name: f"measures=fed.NamedMeasures([...], {name}=...)" for name in table(NamedMeasures) if name != "names"
}
_IN_OBJECTS["rho"] = "fed.FedSAM(rho=...)"


@suggest_option(_IN_OBJECTS)
@with_help(Settings)
@restore_autograd()
def run(
    model: nn.Module,
    clients: Any,
    algorithm: Algorithm,
    *,
    rounds: int,
    local_epochs: int = 1,
    local_steps: int | None = None,
    batch_size: int = 16,
    drop_last: bool = False,
    lr: Rate | None = None,
    lr_decay: float = 1.0,
    participation: float = 0.2,
    cohort: int | None = None,
    sampler: str | Sampler | None = None,
    available: str | Available | None = None,
    weighting: str | Weighting = "uniform",
    aggregation: str | Aggregation = "mean",
    shuffle: bool = True,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
    clip_norm: float | None = None,
    clip_scope: str = "full",
    optimizer: str | Optimizer | None = None,
    optimizer_state: str = "reset",
    server_lr: Rate = 1.0,
    seed: int = 0,
    test: Any = None,
    collate: Collate | None = None,
    loss: str | Loss | BatchLoss = "cross_entropy",
    client_test_split: str = "prior",
    eval_every: int = 1,
    metrics: Mapping[str, Any] | None = None,
    local_parameters: str | Sequence[str] | None = None,
    target: float | None = None,
    buffers: str | None = None,
    device: torch.device | str | None = None,
    backend: str = "auto",
    executor: str = "auto",
    precision: str | None = None,
    slots: int | None = None,
    memory_format: str = "auto",
    client_state: str = "auto",
    max_excluded: float = 1.0,
    on_client_error: str = "raise",
    privacy: Privacy | Mapping[str, Any] | None = None,
    compression: TopK | Mapping[str, Any] | None = None,
    measures: Sequence[str] | NamedMeasures | Mapping[str, Any] | Measures = (),
    run_dir: str | Path | None = None,
    resume: bool = False,
    checkpoint_every: int = 1,
    callbacks: Sequence[Any] = (),
    progress: Progress | bool | None = None,
    config: dict[str, Any] | None = None,
) -> Result:
    """Train `model` on `clients` with a federated algorithm.

        >>> result = fed.run(model, fed.digits(clients=50), fed.FedSAM(rho=0.05), rounds=50)

    Args:
        model: any module whose trainable parameters are all float32 or all float64. Its weights are the start. It is
            not changed; the result has a new model in the same memory format.
        clients: a `FederatedData`, a `LazyClients`, or a sequence of clients: pairs (x, y) of tensors or arrays, data
            sets, or loaders.
        algorithm: `FedAvg()`, `FedSAM(rho=0.05)`, ..., or an object of a class that you write (see
            `fastsam.fed.Algorithm`).
        test: the test set, in one of the forms of a client, or `fed.ClientTestSets`; default: the test set of the
            `FederatedData`.
        collate: function of a list of samples that makes a batch; default: torch's `default_collate`.
        OPTIONS
        run_dir: directory for records and checkpoints.
        resume: continue the run in run_dir, with the same bits.
        callbacks: objects that are called at the start, after every round and evaluation, and at the end, and that may
            stop the run: see `fed.Callback`.
        progress: function of each round's record; or whether to show a bar, by default on a terminal.
        config: content of config.json; default: the options.

    Raises:
        ValueError: an argument is invalid; nothing was written.
        RunDirectoryError: a directory or checkpoint cannot be used.
        ClientError: the model or the loss raised an error for a client.
        AlgorithmError: a method of the algorithm raised an error; it is a ValueError.
        CallbackError: a callback raised an error.
        RuntimeError: all clients of a round were excluded.
        RankError: under torchrun (docs/executors.md), ranks were called differently, or one has died.

    After an error, or Ctrl-C, the run directory has the last completed round, after a RankError the last checkpoint.
    """
    options = {name: value for name, value in locals().items() if name in table(Settings)}
    settings = with_own_buffers(Settings(**with_own_optimizer(options, algorithm)), algorithm)
    loss_function = cast("Loss | BatchLoss", settings.loss)  # a name is a function by now
    _check_surroundings(run_dir, resume, collate)
    listeners = CallbackHandler(callbacks, progress, type(algorithm).__name__, rounds)
    check_algorithm(algorithm)
    dtype = check_model(model)
    place = pick_device(device, trainable(model)[0].device)
    backend = backends.select(backend, place, dtype).name
    population = prepare(clients, test, dtype, place, isinstance(loss_function, BatchLoss), collate)
    if not population.test_size:
        log.warning(NO_TEST_SET)
    warn_of_small_rounds(algorithm, settings, len(population.clients))
    loss = cast(Loss, population.loss_of(loss_function))
    facts: dict[str, Any] = {
        "algorithm": type(algorithm).__name__,
        "hyperparameters": hyperparameters(algorithm),
        "backend": backend,
    }
    model_copy = reorder(model, settings.memory_format, place, stacked=executors.stacks(executor))
    model_copy = with_precision(model_copy, settings.precision, place)
    keep_freed(place)
    with listeners, join_ranks() as ranks, repeatable(place), ExitStack() as stack, register_run() as registration:
        stack.enter_context(float32_flags(settings.precision, place))
        with trials:
            trial = try_model(model_copy, population, loss, batch_size, drop_last)
        registration.update(trial.effects.draws is not None or population.clients.draws)
        check_buffers(trial, settings.buffers)
        loop, state = assemble(model, model_copy, population, algorithm, settings, loss, trial, backend, ranks)
        run_dir, resume = ranks.broadcast((None if run_dir is None else abspath(run_dir), resume))
        directory = None
        identity = cache(partial(identity_of, dict(facts), settings, loop, (model, model_copy), population, collate))
        if ranks.size > 1:
            run_facts = {"weights": digest(model), "callbacks": listeners.names()}
            ranks.agree(identity() | settings.call_options() | run_facts)
        if run_dir is not None:
            directory, state = open_directory(run_dir, resume, loop, state, identity(), config, stack)
        export_state = partial(_export, model, loop)
        listeners.start(
            ranks, state, directory, lambda: config or settings_of(facts, settings), export_state, identity,
            loop.has_value,
        )  # fmt: skip
        state = loop.run(state, directory, listeners)
        nbytes, vectors, client_accuracies = (
            loop.nbytes(state),
            loop.client_vectors(state),
            loop.client_accuracies(state),
        )
    with listeners:
        final = export_state(state)
        facts |= _summary(loop) | {
            "stopped": listeners.stopped,
            "state_megabytes": nbytes / 1e6,
            "client_vectors": vectors,
        }
        facts["train_accuracy"] = _train_accuracy(loop, population, state) if trial.classifies else None
        client_model = None
        if loop.personal is not None:
            client_model = partial(
                _client_model, model, loop.view.layout, loop.personal, state, len(population.clients)
            )
        path = None if directory is None else directory.path
        result = Result(final, state.history, facts, path, settings, client_model, client_accuracies)
        if directory is not None and ranks.first:
            directory.finish(final, result.summary(), client_accuracies)
        listeners.end(result)
    return result


def _export(model: nn.Module, loop: Loop, state: RunState) -> nn.Module:
    """Return a copy of the user's model with the global weights after a run."""
    return export(model, loop.view.layout.views(state.server["w"]), state.buffers)


def _client_model(
    model: nn.Module, layout: Layout, personal: ClientModels, state: RunState, clients: int, client: int
) -> nn.Module:
    """Return a copy of the user's model with the weights of `client`. Raises ValueError for an unknown client."""
    if integer("client", client, at_least=0) >= clients:
        raise ValueError(f"client must be one of the run's clients 0 to {clients - 1}, got {client!r}")
    local = state.clients.get(client)
    return export(model, layout.views(personal.row(state.server, local)), personal.buffers(state.buffers, local))


def _train_accuracy(loop: Loop, population: Population, state: RunState) -> float | None:
    """Return the accuracy of the final model on all clients' samples if there is no test set and they are in memory.
    It is None, with a warning, if the model raises for them, as for clients that were excluded."""
    if population.test_size or not isinstance(population.clients, PairClients):
        return None
    loop.view.load(state.server["w"], state.buffers)
    device = population.device
    with torch.random.fork_rng([device] if device.type == "cuda" else []):  # a model may draw in evaluation mode too
        torch.manual_seed(loop.settings.seed)
        try:
            return accuracy(loop.view, population.clients.pairs, state.server["w"], loop.evaluator.kind.unlabelled)
        except Exception as error:  # the run is done, and its result is not to be lost
            log.warning("train_accuracy is None: the model raised %s: %s", type(error).__name__, error)
            return None


def _check_surroundings(run_dir: Any, resume: Any, collate: Any) -> None:
    """Raise ValueError for arguments and a state of torch that would fail only after the first round, or never."""
    if any(torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda")):
        raise ValueError(
            "fed.run was called inside torch.autocast, which keeps casts of weights that change. Pass "
            "precision='bf16', or put the region into the model's forward()"
        )
    if run_dir is not None and (not isinstance(run_dir, (str, PathLike)) or run_dir == ""):
        raise ValueError(f"run_dir must be a path, got {run_dir!r}")
    if choice("resume", resume, (True, False)) and run_dir is None:
        raise ValueError("resume=True continues what is in run_dir; name the directory")
    if collate is not None and (not callable(collate) or isinstance(collate, type)):
        raise ValueError(f"collate must be a function of a list of samples that returns a batch, got {collate!r}")


def _summary(loop: Loop) -> dict[str, Any]:
    """Return the facts of a finished run. `client_megabytes` is the memory of a local step in units of 1e6 bytes."""
    return {
        "executor": loop.choice.name,
        "slots": loop.choice.executor.slots,
        "client_state": loop.states.location,
        "parameters": loop.view.layout.numel,
        "validation": loop.evaluator.mode,
        "target": loop.settings.target,
        "metrics": list(loop.evaluator.metrics),
        "seed": loop.settings.seed,
        "client_megabytes": loop.vectors * loop.view.nbytes / 1e6,
        "privacy": None,
        **{key: value for stage in loop.stages for key, value in stage.summary().items()},
    }
