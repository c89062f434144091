"""The assembly of a run from model, clients, algorithm and options, with a trial before anything is written."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any, cast

from torch import nn

from fastsam.arena import Layout
from fastsam.fed import executors
from fastsam.fed.algorithms.base import Algorithm
from fastsam.fed.clients import sampling
from fastsam.fed.clients.population import Loss, Population
from fastsam.fed.clients.sampling import own_weights
from fastsam.fed.loop import client_state
from fastsam.fed.loop.checked_contract import contract_of
from fastsam.fed.loop.contract import check_initial_state
from fastsam.fed.loop.evaluate import Evaluator
from fastsam.fed.loop.loop import Loop
from fastsam.fed.loop.options import Settings
from fastsam.fed.loop.personal import PersonalizedAlgorithm, client_models_of
from fastsam.fed.loop.pooled_data import in_turn, pool_data
from fastsam.fed.loop.requirements import Facts, check
from fastsam.fed.loop.trial import Trial, check_smallest
from fastsam.fed.loop.trial_algorithm import try_algorithm
from fastsam.fed.measures import NamedMeasures, make
from fastsam.fed.measures.hook import ALONG_THE_PATH
from fastsam.fed.measures.metrics import resolve
from fastsam.fed.rundir.checkpoint import RunState
from fastsam.fed.stages.noise import noise_of
from fastsam.fed.stages.order import chain
from fastsam.fed.sums.ranks import Ranks
from fastsam.fed.update.model_copy import Replica, copy_model, trainable
from fastsam.fed.update.parameter_layout import ParameterLayout

log = logging.getLogger("fastsam.fed")
NO_PREDICTIONS = (
    "accuracies are None, because a loss of a whole batch gives no outputs and labels. For accuracies pass "
    "fed.BatchLoss(loss, predict), with predict(model, batch) -> (outputs, labels)"
)
NO_LABELS = (
    "client accuracies are None, because client_test_split='prior' needs the labels of all clients and of the test set "
    "in memory. Give the samples a column 'labels', or pass client_test_split='iid' or 'shared'"
)


def assemble(
    user_model: nn.Module,
    model: nn.Module,
    population: Population,
    algorithm: Algorithm,
    settings: Settings,
    loss: Loss,
    trial: Trial,
    backend: str,
    ranks: Ranks,
) -> tuple[Loop, RunState]:
    """Return a run, and its state before the first round. `model` is `user_model`, or a copy of it in another memory
    format."""
    device, clients, effects = population.device, len(population.clients), trial.effects
    # The copies of all clients share its frozen parameters, which a model may write: the user's must stay.
    model = copy_model(model).to(device)
    layout = Layout.from_tensors(trainable(model))
    parameter_layout = ParameterLayout.from_model(user_model, layout)
    view = Replica.new(model, layout, device)
    metrics = resolve(settings.metrics)
    mode, seed, batch_size = settings.client_test_split, settings.seed, settings.batch_size
    evaluator = Evaluator(loss, population, trial.classifies, mode, seed, metrics, batch_size, trial.loss_kind)
    if metrics or not trial.loss_kind.is_mean:
        evaluator(view.module)  # errors of metrics, and of a loss that needs all outputs, come before the first round
        evaluator.client_accuracies = None
    if ranks.first and population.test_size:
        _warn_of_accuracies(evaluator)
    names = settings.measures.names if isinstance(settings.measures, NamedMeasures) else None
    cohort = sampling.likely(settings.sampler, clients, settings.share_of(clients))
    facts = Facts(
        settings, algorithm, ranks.size, clients, cohort, effects.changed_buffers, (), population.clients.has_all_sizes,
        names is None or bool(names), sorted(ALONG_THE_PATH.intersection(names or ())), loss_kind=trial.loss_kind,
        measures=names or (), set_sizes=_set_sizes(population, settings.measures),
        written_parameters=effects.written_parameters,
        gradient_bytes=_measured_samples(population, settings.measures) * trial.sample_activations,
    )  # fmt: skip
    check(facts)
    patterns = list(getattr(algorithm, "own_parameters", lambda model: ())(user_model))
    facts = replace(facts, own_parameters=patterns)
    check(facts)
    buffers = view.copy_of_buffers()
    personal = client_models_of(algorithm, settings, parameter_layout, patterns, buffers)
    algorithm = cast(Algorithm, personal) if isinstance(personal, PersonalizedAlgorithm) else algorithm
    contract = contract_of(algorithm)
    server = check_initial_state(contract.init_server(view.row.clone()), "init_server")
    noise = noise_of(settings, parameter_layout, clients, device)
    state, weights = RunState(0, server, buffers), own_weights(settings.weighting, clients)
    if getattr(algorithm, "pools_data", False):
        weights = None
        population = pool_data(population, settings.share_of(clients), seed)
        clients, cohort = len(population.clients), len(population.clients)
        settings = replace(settings, sampler=in_turn(clients), available=None)
    setup = executors.Setup(
        model, layout, loss, settings.local, population, backend, effects.draws, bool(effects.changed_buffers),
        trial.example, cohort, facts.name if contract.has_loop else "", trial.activations,
        trial.sample_activations, bool(effects.written_parameters),
    )  # fmt: skip
    first = settings.round(0, clients, 1, parameter_layout)
    tried = try_algorithm(contract, setup, state, first, lambda step: check(replace(facts, step=step)))
    check(replace(facts, step=tried.step, has_phases=tried.has_phases))
    check_smallest(model, population, loss, batch_size, settings.drop_last)
    choice = executors.choose(settings.executor, setup)
    if choice.warning and ranks.first:
        log.warning(choice.warning)
    vectors = client_state.vectors(algorithm, server) + (settings.compression is not None)
    vectors += setup.optimizer_vectors if settings.optimizer_state == "keep" else 0
    nbytes = clients * vectors * view.row.nbytes
    states = client_state.make(settings.client_state, device, nbytes, choice.executor.slots)
    measures = make(
        settings.measures, settings.buffers, model=model, layout=layout, population=population, loss=loss,
        batch_size=batch_size, rounds=settings.rounds, seed=seed, classifies=trial.classifies,
        kind=trial.loss_kind,
    )  # fmt: skip
    mask = personal.mask if isinstance(personal, PersonalizedAlgorithm) else None
    local = None if mask is None or not mask.any() else mask  # local buffers have no local parameters
    stages = chain(algorithm, settings, measures, noise, layout.numel, local)
    loop = Loop(
        population, contract, settings, choice, evaluator, view, states, ranks, parameter_layout, stages, weights,
        personal, tried.vectors,
    )  # fmt: skip
    return loop, state


def _warn_of_accuracies(evaluator: Evaluator) -> None:
    """Log a warning if there are no accuracies, or no accuracies over clients, for want of outputs or labels."""
    if not evaluator.loss.predicts:
        log.warning(NO_PREDICTIONS)
    elif evaluator.classifies and evaluator.mode is None:
        log.warning(NO_LABELS)


def _set_sizes(population: Population, measures: Any) -> dict[str, int]:
    """Return the numbers of samples of the sets whose loss the run records, by the option that requests it."""
    sizes = {"test=": population.test_size}
    if isinstance(measures, NamedMeasures) and "train" in measures.names:
        sizes["measures=['train']"] = _measured_samples(population, measures)
    return sizes


def _measured_samples(population: Population, measures: Any) -> int:
    """Return the number of samples of the clients that named measures read, 0 if it is unknown."""
    if not isinstance(measures, NamedMeasures) or not population.clients.has_all_sizes:
        return 0
    total = sum(population.clients.sizes)
    return total if measures.samples is None else min(total, measures.samples)
