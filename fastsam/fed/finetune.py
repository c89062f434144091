"""Fine-tuning after a run: each client trains the final model, and its accuracy is measured before and after."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

from torch import nn

from fastsam.fed.algorithms.fedavg import FedAvg
from fastsam.fed.clients.batch_loss import BatchLoss
from fastsam.fed.clients.lazy import LazyClients
from fastsam.fed.clients.population import Loss, Population
from fastsam.fed.clients.prepare import prepare
from fastsam.fed.clients.samples import Collate
from fastsam.fed.common import seeds
from fastsam.fed.common.checks import integer
from fastsam.fed.loop.determinism import trials
from fastsam.fed.loop.evaluate import Evaluator
from fastsam.fed.loop.run import NO_TEST_SET, log, run
from fastsam.fed.loop.trial import try_model
from fastsam.fed.rundir.result import Result
from fastsam.fed.update.precision import with_precision


def finetune(
    result: Result,
    clients: Any,
    *,
    epochs: int = 1,
    lr: float | None = None,
    test: Any = None,
    collate: Collate | None = None,
) -> list[dict[str, Any]]:
    """Train the final model on each client separately and return its accuracy before and after.

    Each client takes plain local steps with the run's optimizer, batch size, momentum, weight decay, clipping and
    loss. It starts from the global model, or from its own model if the algorithm keeps one. Accuracies are measured on
    the samples that the run evaluated this client on. The result does not change.

    Args:
        result: result of `fed.run`.
        clients: the clients of that run, in the same order.
        epochs: local epochs per client, at least 1.
        lr: learning rate; default: the learning rate of the run's last round.
        test: the test set, as in `fed.run`; default: the test set of a `FederatedData`.
        collate: see `fed.run`.

    Returns:
        One dict per client: `client`, and the accuracies `before` and `after` in 0..1, None if it has no test samples.

    Raises:
        ValueError: `epochs` is below 1, there is no test set, or the model does not classify.
    """
    epochs = integer("epochs", epochs, at_least=1)
    settings, model = result.settings, result.model
    loss_function = cast("Loss | BatchLoss", settings.loss)
    weights = next(p for p in model.parameters() if p.requires_grad)
    population = prepare(clients, test, weights.dtype, weights.device, isinstance(loss_function, BatchLoss), collate)
    loss = population.loss_of(loss_function)
    with trials:
        classifies = try_model(model, population, loss, settings.batch_size).classifies
    evaluator = Evaluator(cast(Loss, loss), population, classifies, settings.client_test_split, settings.seed)
    if not evaluator.classifies:
        raise ValueError(
            "fine-tuning reports each client's accuracy. It needs a test set and a model with one output per class. "
            "Pass test=(x, y)"
        )
    steps = {
        "rounds": 1, "local_epochs": epochs, "participation": 1.0, "executor": "sequential", "progress": False,
        "lr": settings.rates_of(max(len(result.history) - 1, 0))["lr"] if lr is None else lr,
        "buffers": "average" if settings.buffers == "local" else settings.buffers,
        **{name: getattr(settings, name) for name in _REUSED},
    }  # fmt: skip
    accuracies = []
    for i, parameters in enumerate(_each(clients, population)):
        start: nn.Module = result.client_model(i) if result.has_client_models else model
        seed = seeds.derive(settings.seed, "finetune", i) % 2**31
        with _no_warning_of_test_sets():
            client_run = run(start, parameters, FedAvg(), seed=seed, collate=collate, **steps)
        old_accuracy, new_accuracy = (
            evaluator.accuracy_of_client(with_precision(one, settings.precision, weights.device), i)
            for one in (start, client_run.model)
        )
        accuracies.append({"client": i, "before": old_accuracy, "after": new_accuracy})
    return accuracies


_REUSED = (
    *("batch_size", "drop_last", "shuffle", "momentum", "weight_decay", "clip_norm", "clip_scope"),
    *("optimizer", "loss", "precision"),
)


@contextmanager
def _no_warning_of_test_sets() -> Iterator[None]:
    """Keep runs from warning that they have no test set. Here an evaluator has it."""

    def is_other(record: logging.LogRecord) -> bool:
        return record.msg != NO_TEST_SET

    log.addFilter(is_other)
    try:
        yield
    finally:
        log.removeFilter(is_other)


def _each(clients: Any, population: Population) -> Iterator[Sequence[Any]]:
    """Yield each client as a federation of one."""
    for i in range(len(clients)):
        if isinstance(clients, LazyClients):
            yield [clients.load(i)]
        elif population.augment is not None:
            yield replace(clients, clients=[clients[i]], priors=None, domains=None)
        else:
            yield [clients[i]]
