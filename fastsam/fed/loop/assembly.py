"""The assembly of a run from model, clients, algorithm and options, with a trial before anything is written."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

from torch import Tensor, nn

from fastsam.arena import Layout
from fastsam.fed import executors
from fastsam.fed.algorithms.base import Algorithm, LocalUpdate, Round
from fastsam.fed.clients import sampling
from fastsam.fed.clients.population import Loss, Population
from fastsam.fed.clients.weights import own_weights
from fastsam.fed.loop import client_state, trial_loop, trial_step
from fastsam.fed.loop.algorithm_calls import Contract, contract_of
from fastsam.fed.loop.contract import call_algorithm, check_initial_state
from fastsam.fed.loop.evaluate import Evaluator
from fastsam.fed.loop.loop import Loop
from fastsam.fed.loop.options import Settings
from fastsam.fed.loop.padding import check_padding_of_step
from fastsam.fed.loop.personal import PersonalizedAlgorithm, client_models_of, own_parameters_of
from fastsam.fed.loop.pooled_data import in_turn, pooled
from fastsam.fed.loop.requirements import Facts, check
from fastsam.fed.measures import Measures, NamedMeasures, make
from fastsam.fed.measures.hook import ALONG_THE_PATH
from fastsam.fed.measures.metrics import resolve
from fastsam.fed.privacy.options import privacy_of
from fastsam.fed.rundir.checkpoint import RunState
from fastsam.fed.stages.compression import compression_of
from fastsam.fed.stages.noise import noise_of
from fastsam.fed.stages.order import chain
from fastsam.fed.step.model_copy import Replica, trainable
from fastsam.fed.step.parameter_layout import ParameterLayout
from fastsam.fed.sums.ranks import Ranks


def assemble(
    own: nn.Module,
    model: nn.Module,
    population: Population,
    algorithm: Algorithm,
    settings: Settings,
    loss: Loss,
    tried: trial_step.Trial,
    backend: str,
    measures: NamedMeasures | Measures,
    ranks: Ranks,
) -> tuple[Loop, RunState]:
    """Return a run, and its state before the first round.

    Args:
        own: the user's model.
        model: the model that is trained, perhaps in another memory format.
    """
    place, layout = population.device, Layout.of(trainable(model))
    parameter_layout = ParameterLayout.of(own, layout)
    view = Replica.new(model, layout, place)
    metrics = resolve(settings.metrics)
    evaluator = Evaluator(
        loss, population, tried.classifies, settings.client_test_split, settings.seed, metrics, settings.batch_size
    )
    if metrics:
        evaluator(view.module)  # errors of metrics come before the first round
    clients = len(population.sizes)
    if settings.cohort is not None and settings.cohort > clients:
        raise ValueError(
            f"cohort={settings.cohort} needs at least {settings.cohort} clients, but there are {clients}. Use a "
            "smaller cohort"
        )
    names = measures.names if isinstance(measures, NamedMeasures) else ()
    facts = Facts(
        settings,
        algorithm,
        ranks.size,
        sampling.likely(settings.sampler, clients, settings.share_of(clients)),
        tried.changed_buffers,
        sized=population.sized,
        measured=not isinstance(measures, NamedMeasures) or bool(names),
        path_measures=sorted(ALONG_THE_PATH.intersection(names)),
    )
    check(facts)
    facts = replace(facts, own_parameters=own_parameters_of(algorithm, own))
    check(facts)
    personal = client_models_of(
        algorithm, settings, parameter_layout, view.copy_of_buffers() if tried.changed_buffers else ()
    )
    algorithm = cast(Algorithm, personal) if isinstance(personal, PersonalizedAlgorithm) else algorithm
    w0 = view.row.clone()
    contract = contract_of(algorithm)
    server = check_initial_state(contract.init_server(w0), "init_server")
    noise = noise_of(settings, parameter_layout, len(population.sizes), place)
    state = RunState(0, server, view.copy_of_buffers())
    weights = own_weights(settings.weighting, len(population.sizes))
    if getattr(algorithm, "pools_data", False):
        weights = None
        population = pooled(population, settings.share_of(len(population.sizes)), settings.seed)
        settings = replace(settings, sampler=in_turn(len(population.sizes)), available=None)
    clients = len(population.sizes)
    cohort = sampling.likely(settings.sampler, clients, settings.share_of(clients))
    setup = executors.Setup(
        model, layout, loss, settings.local, population, backend, tried.draws, bool(tried.changed_buffers),
        tried.example, cohort, facts.name if contract.has_loop else "",
    )  # fmt: skip
    update, has_phases = _try(contract, setup, settings, state, parameter_layout)
    check(replace(facts, update=update, has_phases=has_phases))
    trial_step.check_smallest(model, population, loss, settings.batch_size, settings.drop_last)
    chosen = executors.choose(settings.executor, setup)
    vectors = client_state.vectors(algorithm, state.server) + (settings.compression is not None)
    nbytes = len(population.sizes) * vectors * w0.nbytes
    states = client_state.make(settings.client_state, place, nbytes, chosen.executor.slots)
    measuring = make(
        measures, settings.buffers, model=model, layout=layout, population=population, loss=loss,
        batch_size=settings.batch_size, rounds=settings.rounds, seed=settings.seed, classifies=tried.classifies,
    )  # fmt: skip
    stages = chain(
        algorithm,
        clip=privacy_of(settings.privacy).clip,
        buffers=settings.buffers,
        rule=settings.rule,
        measures=measuring,
        noise=noise,
        compression=compression_of(settings.compression),
        numel=layout.numel,
    )
    run = Loop(
        population, contract, settings, chosen, evaluator, view, states, ranks, parameter_layout, stages, weights,
        personal,
    )  # fmt: skip
    return run, state


def _try(
    contract: Contract,
    setup: executors.Setup,
    settings: Settings,
    state: RunState,
    layout: ParameterLayout,
) -> tuple[LocalUpdate, bool]:
    """Call the algorithm for a first client, so that its errors come before anything is written. Return the client's
    constants, and whether it has a loop with phases, or with further models."""
    lr = settings.lr_of(0)
    about = Round(0, lr, settings.local_epochs, len(setup.population.sizes), 1, settings.server_lr_of(0), lr, layout,
                  settings.momentum, settings.seed)  # fmt: skip
    client = contract.init_client(state.server)
    constants = contract.local_updates(state.server, client_state.rows([client]), 1, about)[0]
    if getattr(contract.algorithm, "own_models", False):
        own, w = call_algorithm(contract.algorithm, "own_model", (state.server, client), None), state.server["w"]
        if not isinstance(own, Tensor) or (own.shape, own.dtype, own.device) != (w.shape, w.dtype, w.device):
            got = f"{own.dtype} {list(own.shape)} on {own.device}" if isinstance(own, Tensor) else type(own).__name__
            raise ValueError(
                f"own_model must return the weights of one client, {w.dtype} {list(w.shape)} on {w.device}; the state "
                f"that it gets has no dimension for rows. Got {got}"
            )
    check_padding_of_step(constants[0], layout)
    if not contract.has_loop:
        return constants[0], False
    return constants[0], trial_loop.try_loop(contract, setup, state, client, constants, about)
